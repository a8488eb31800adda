"""The language-model tier of selectors: a model reads the case and names one of three letters.

The likelihoods are the probabilities of the letters, normalised over the three (method 2.8). The
prompt is the same in training and in use; a selector that was trained on another is refused.

A folder of a trained selector holds a LoRA adapter (`adapter_model.safetensors`,
`adapter_config.json`) and what is known about it (`selector.json`). Weights are read from
safetensors alone, those of the base too: nothing is unpickled, and no code of a folder is run.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from splice.errors import ModelError, SettingsError, WeightsError
from splice.evidence import evidence_block
from splice.executor import book_call
from splice.files import read_text
from splice.learned import TrainingPool
from splice.models.protocol import ChatModel
from splice.prompts import excerpt, one_line, render
from splice.records import (
    CallRecord,
    ChatMessage,
    Completion,
    Evidence,
    Likelihoods,
    ModelSettings,
    Record,
    Request,
    TokenLogprob,
    Usage,
    digest,
)
from splice.selector import SelectorInput, normalised

if TYPE_CHECKING:
    from torch import Tensor

LABELS: Final = ("A", "B", "C")
"""What stands for beneficial, neutral and harmful: single letters, so that none is favoured for
being short."""

ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"

EVIDENCE_VIEW: Final = "evidence"
"""What a selector is shown of a trial in use; any other view is for comparison."""

_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"})
_HEAD_CHARS: Final = 1400
_TAIL_CHARS: Final = 600
"""What is shown of a long text. Both ends: questions begin with what is asked, answers end with
what is concluded."""
_MOST_ALTERNATIVES: Final = 20
"""Log-probabilities asked for: as many as servers give."""


# --- the prompt ------------------------------------------------------------------------------


def selector_messages(case: SelectorInput, block: str | None = None) -> tuple[ChatMessage, ...]:
    """What a language model is asked about a trial, in training as in use.

    Args:
        case: the trial.
        block: what stands in place of the evidence, where another view is compared with it; None:
            the evidence.
    """
    prompt = render(
        "selector",
        question=shown(case.question),
        workflow=one_line(case.workflow),
        base_score=f"{case.base_score:.2f}",
        base_answer=shown(case.base_answer),
        candidate_answer=shown(case.candidate_answer),
        evidence=evidence_block(case.evidence) if block is None else block,
    )
    return (ChatMessage(role="user", content=prompt),)


def shown(text: str | None) -> str:
    """A text as selectors are shown it: quoted, without its middle if it is long."""
    return "(there is none)" if text is None else excerpt(text, _HEAD_CHARS, _TAIL_CHARS)


@cache
def prompt_digest(view: str = EVIDENCE_VIEW) -> str:
    """Digest of the prompt of a made-up case: its wording, its cuts, the form of its evidence.

    Args:
        view: what stands where the evidence stands in use.
    """
    values: dict[object, object] = {bool: True, int: 7}
    evidence = {
        name: values.get(field.annotation, place / 100)
        for place, (name, field) in enumerate(Evidence.model_fields.items())
    }
    case = SelectorInput(
        question=" ".join(map(str, range(_HEAD_CHARS))),
        workflow="a workflow",
        base_score=0.5,
        base_answer=None,
        candidate_answer="an\nanswer",
        evidence=Evidence.model_validate({**evidence, "survival": (0.5, 0.25)}),
    )
    other = () if view == EVIDENCE_VIEW else (view,)
    asked = (f"{m.role}\0{m.content}" for m in selector_messages(case))
    return digest("\0".join((*asked, *other)))


def encoded_prompt(tokenizer: Any, messages: Sequence[ChatMessage]) -> list[int]:
    """Token ids of a prompt, up to where the reply begins.

    A model without a chat template gets the bare text.
    """
    if tokenizer.chat_template is None:
        text = "\n".join(message.content for message in messages) + "\n"
        return list(tokenizer(text)["input_ids"])
    turns = [{"role": message.role, "content": message.content} for message in messages]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encoded_labels(tokenizer: Any, labels: Sequence[str] = LABELS) -> tuple[tuple[int, ...], ...]:
    """Token ids of each label.

    Raises:
        SettingsError: the tokenizer can't tell two labels apart.
    """
    found = tuple(
        tuple(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in labels
    )
    if len(set(found)) < len(labels) or not all(found):
        raise SettingsError(f"the model's tokenizer can't tell the labels {list(labels)} apart")
    return found


# --- scores of labels ------------------------------------------------------------------------


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts as one batch that ends where the replies begin.

    Returns:
        (n, longest) token ids, and as many ones and zeros: one where there is a token.
    """
    import torch

    longest = max(map(len, prompts))
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def label_scores(model: Any, ids: Tensor, mask: Tensor, labels: Sequence[Sequence[int]]) -> Tensor:
    """Log-probability of each label after each prompt, summed over the label's tokens.

    One pass for all labels. Where a label has several tokens, all but its last follow the prompt in
    the same sequence: each attends to the prompt and to its own label only, at the position that it
    would have if it stood there alone. So the keys and values of a prompt are computed once, in
    training too, where a cache and gradient checkpointing would exclude each other.

    Args:
        model: a causal language model.
        ids: (n, length) prompts, padded on the left.
        mask: (n, length) one where there is a token.
        labels: token ids of each label.

    Returns:
        (n, n_labels) log-probabilities over the whole vocabulary, with gradients if these are on.
    """
    import torch

    positions = (mask.cumsum(1) - 1).clamp(min=0)
    n_tail = sum(len(label) - 1 for label in labels)
    attention = mask
    if n_tail:
        tail = [token for label in labels for token in label[:-1]]
        steps = [place for label in labels for place in range(1, len(label))]
        ids = torch.cat([ids, ids.new_tensor(tail).expand(len(ids), -1)], dim=1)
        after = positions[:, -1:] + positions.new_tensor(steps)
        positions = torch.cat([positions, after], dim=1)
        attention = _branching_attention(mask, labels, next(model.parameters()).dtype)
    logits = model(
        input_ids=ids,
        attention_mask=attention,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=n_tail + 1,
    ).logits
    logprobs = logits.float().log_softmax(-1)
    scores, begin = [], 1
    for label in labels:
        # What predicts a label's first token is the end of the prompt, shared by all labels.
        places = [0, *range(begin, begin + len(label) - 1)]
        scores.append(logprobs[:, places, list(label)].sum(-1))
        begin += len(label) - 1
    return torch.stack(scores, dim=1)


def _branching_attention(mask: Tensor, labels: Sequence[Sequence[int]], dtype: Any) -> Tensor:
    """(n, 1, length, length) what is added to attention: 0 where it is allowed."""
    import torch

    branches = [0] * mask.shape[1]
    for number, label in enumerate(labels, 1):
        branches += [number] * (len(label) - 1)
    branch = mask.new_tensor(branches)
    length = len(branch)
    is_before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    is_own = (branch == 0) | (branch == branch[:, None])
    is_token = torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], dim=1).bool()
    # Padding attends to itself, as a row without anything to attend to would be no number.
    is_self = torch.eye(length, dtype=torch.bool, device=mask.device)
    is_allowed = (is_before & is_own & is_token[:, None, :]) | is_self
    added = torch.zeros(is_allowed.shape, dtype=dtype, device=mask.device)
    return added.masked_fill(~is_allowed, torch.finfo(dtype).min)[:, None]


# --- a trained selector ----------------------------------------------------------------------


class SelectorCard(Record):
    """What is known about a trained selector: `selector.json`."""

    schema_version: Literal[1] = 1
    base: str
    """Name or folder of the model that the adapter was trained on."""
    adapter_sha256: str
    """Of `adapter_model.safetensors`."""
    labels: tuple[str, str, str]
    """For beneficial, neutral and harmful."""
    temperature: Annotated[float, Field(gt=0.0)]
    """Scores are divided by it before they are normalised."""
    prompt: str
    """Digest of the prompt that it was trained on; see `prompt_digest`."""
    pools: tuple[TrainingPool, ...] = ()
    packages: Mapping[str, str] = {}
    """Version by package, of what it was trained with."""


class LanguageSelector:
    """Selector by a causal language model with a trained adapter, run by PyTorch.

    On a GPU, if there is one, in bfloat16; else in float32.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        base: str | Path | None = None,
        batch_size: int = 8,
        view: str = EVIDENCE_VIEW,
    ) -> None:
        """Load base and adapter, which takes seconds to minutes.

        Args:
            folder: of the trained selector.
            base: name or folder of the base; None: the one that the adapter names.
            batch_size: most cases in one pass.
            view: what it was trained on in place of the evidence, for comparison. `judge` shows
                the evidence whatever it is; other views go through `judge_prompts`.

        Raises:
            SettingsError: the extra `train` is not installed.
            WeightsError: a file is missing, is not what `selector.json` says, is a pickle, or was
                trained on another prompt.
        """
        require_extra()
        folder = Path(folder)
        self.card = read_card(folder, view)
        named = _base_of_adapter(folder)
        tokenizer, model = load_base(str(base or named))
        from peft import PeftModel

        try:
            model = PeftModel.from_pretrained(model, str(folder))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise WeightsError(f"{folder}: the adapter does not fit its base: {error}") from None
        self._model = model.to(_device()).eval()
        self._tokenizer = tokenizer
        self._labels = encoded_labels(tokenizer)
        self._batch_size = batch_size
        self._lock = threading.Lock()

    async def judge(self, case: SelectorInput) -> Likelihoods:
        """Likelihoods of one case, computed in a thread."""
        (likelihoods,) = await self.judge_many([case])
        return likelihoods

    async def judge_many(self, cases: Sequence[SelectorInput]) -> tuple[Likelihoods, ...]:
        """Likelihoods of many cases, in their order; they do not depend on each other."""
        return await self.judge_prompts([selector_messages(case) for case in cases])

    async def judge_prompts(
        self, asked: Sequence[tuple[ChatMessage, ...]]
    ) -> tuple[Likelihoods, ...]:
        """The same for what `selector_messages` gave."""
        return await asyncio.to_thread(self._judged, asked)

    def _judged(self, asked: Sequence[tuple[ChatMessage, ...]]) -> tuple[Likelihoods, ...]:
        import torch

        prompts = [encoded_prompt(self._tokenizer, messages) for messages in asked]
        # Prompts of like length share a batch, as padding is computed too.
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
        name = Path(self.card.base).name
        found: dict[int, Likelihoods] = {}
        with self._lock, torch.inference_mode():
            for start in range(0, len(order), self._batch_size):
                places = order[start : start + self._batch_size]
                ids, mask = left_padded([prompts[place] for place in places], pad=0)
                device = self._model.device
                scores = label_scores(self._model, ids.to(device), mask.to(device), self._labels)
                for place, row in zip(places, scores.tolist(), strict=True):
                    usage = Usage(prompt_tokens=len(prompts[place]), completion_tokens=1)
                    call = CallRecord(
                        stage="select", model=name, outcome="ok", usage=usage, cost=0.0
                    )
                    found[place] = normalised(row, self.card.temperature).model_copy(
                        update={"calls": (call,)}
                    )
        return tuple(found[place] for place in range(len(asked)))


def require_extra() -> None:
    """Check that PyTorch and what goes with it are installed.

    Raises:
        SettingsError: they are not.
    """
    missing = [name for name in ("torch", "transformers", "peft") if find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"language-model selectors need {', '.join(missing)}: "
            "pip install 'splice-repair[train]'"
        )


def load_base(name: str) -> tuple[Any, Any]:
    """Tokenizer and weights of a causal language model.

    Args:
        name: a folder, or a name on the Hugging Face Hub.

    Raises:
        WeightsError: there is none, or it has no safetensors, or needs code of its own.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype="bfloat16" if _device() == "cuda" else "float32",
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise WeightsError(f"no language model can be loaded from {name!r}: {error}") from None
    return tokenizer, model


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def read_card(folder: Path, view: str = EVIDENCE_VIEW) -> SelectorCard:
    """What is known about a trained selector, once its folder was found to be what it says.

    Raises:
        WeightsError: a file is missing, is not what `selector.json` says, is a pickle, or belongs to
            another prompt.
    """
    try:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    except OSError as error:
        raise WeightsError(f"{folder}: {error.strerror}") from None
    if pickles:
        raise WeightsError(
            f"{folder} holds {', '.join(pickles)}: such files can run code when they are loaded; "
            f"a selector has its weights in {ADAPTER_WEIGHTS}"
        )
    path = folder / "selector.json"
    try:
        card = SelectorCard.model_validate_json(read_text(path, WeightsError))
    except ValidationError as error:
        first = error.errors()[0]
        raise WeightsError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if card.prompt != prompt_digest(view) or card.labels != LABELS:
        raise WeightsError(
            f"{folder} was trained on another prompt ({card.prompt[:12]}) than this version asks "
            f"({prompt_digest(view)[:12]}); its likelihoods would mean nothing. Train it again, or use "
            "the version of the library that it was trained with"
        )
    if file_sha256(folder / ADAPTER_WEIGHTS) != card.adapter_sha256:
        raise WeightsError(
            f"{folder / ADAPTER_WEIGHTS} is not the file that selector.json describes: its SHA-256 "
            "differs"
        )
    return card


def file_sha256(path: Path) -> str:
    """SHA-256 of a file of weights.

    Raises:
        WeightsError: it can't be read.
    """
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}") from None


def _base_of_adapter(folder: Path) -> str:
    """Name of the base in `adapter_config.json`, if that is a plain LoRA adapter."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(read_text(path, WeightsError))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not JSON: {error}") from None
    # With a Megatron configuration PEFT imports a module that the file names.
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise WeightsError(f"{path}: peft_type: only LORA adapters are loaded")
    if config.get("megatron_config"):
        raise WeightsError(f"{path}: megatron_config: only plain LORA adapters are loaded")
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str):
        raise WeightsError(f"{path}: base_model_name_or_path: no name of a base")
    return base


# --- any model behind an endpoint ------------------------------------------------------------


class EndpointSelector:
    """Selector by any chat model that reports log-probabilities.

    A server reports the most likely tokens only. A letter that is not among them is taken to be as
    likely as the least likely token that is: an upper bound, so where one letter is missing its
    likelihood is too high and the others are too low, by no more than that token's probability.
    """

    def __init__(self, model: ChatModel, *, temperature: float = 1.0) -> None:
        """Keep the model.

        Args:
            model: what is asked; one request a case.
            temperature: from a calibration on cases with known outcome; it divides the
                log-probabilities and has nothing to do with sampling.
        """
        self._model = model
        self._temperature = temperature

    async def judge(self, case: SelectorInput) -> Likelihoods:
        """Likelihoods from the first token of the model's reply.

        Raises:
            ModelError: no answer came, or one without log-probabilities, or none of the letters is
                among the likely tokens (`reason` is then `bad_response`).
        """
        request = Request(
            messages=selector_messages(case),
            settings=ModelSettings(temperature=0.0, max_tokens=1, logprobs=_MOST_ALTERNATIVES),
            stage="select",
        )
        calls: list[CallRecord] = []
        completion = await book_call(self._model, request, None, calls)
        found = normalised(_letter_scores(completion), self._temperature)
        return found.model_copy(update={"calls": tuple(calls)})


def _letter_scores(completion: Completion) -> list[float]:
    """Log-probability of each letter as the first token, or an upper bound of it."""
    if not completion.logprobs:
        raise ModelError(
            f"model {completion.model!r} gave no log-probabilities: a selector needs a server "
            "that reports them",
            reason="bad_response",
        )
    alternatives = _alternatives(completion.logprobs[0])
    found: dict[str, float] = {}
    for token, logprob in alternatives.items():
        letter = token.strip()
        if letter in LABELS:
            # "A" and " A" are different tokens and the same reply.
            odds = math.exp(found.get(letter, -math.inf)) + math.exp(logprob)
            found[letter] = math.log(odds) if odds else logprob
    if not found:
        shown = ", ".join(repr(token) for token in list(alternatives)[:5])
        raise ModelError(
            f"model {completion.model!r} replies with none of the letters {', '.join(LABELS)}; "
            f"its likeliest tokens are {shown or 'not given'}",
            reason="bad_response",
        )
    least = min(alternatives.values())
    return [found.get(label, least) for label in LABELS]


def _alternatives(first: TokenLogprob) -> dict[str, float]:
    """Finite log-probability by token, of the token itself and of what was likely beside it."""
    known = {first.token: first.logprob, **dict(first.top)}
    return {token: value for token, value in known.items() if math.isfinite(value)}
