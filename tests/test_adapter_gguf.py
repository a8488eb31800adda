"""LoRA adapters for llama.cpp: what is written, and what the embedded model makes of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splice.errors import SettingsError, WeightsError
from splice.models import weights
from splice.models.default import default_model
from splice.models.local import LocalModel, Server, start_server
from splice.records import ChatMessage, ModelSettings, Request
from splice.workflow import Agent, Workflow

# PEFT calls by an old name what Transformers has given a new one.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning")

HEADER = b"GGUF" + bytes(20)
"""What a file of no tensors and no keys begins with."""


# --- choosing --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what looks like weights and like two adapters; the weights are the default."""
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("SPLICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SPLICE_LOCAL_MODEL", str(tmp_path / "mine.gguf"))
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "tuned", "other"):
        (tmp_path / f"{name}.gguf").write_bytes(HEADER + name.encode())
    return tmp_path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_adapter_is_part_of_what_a_model_is_called_and_known_by(folder: Path) -> None:
    plain = LocalModel().identity(None)
    tuned = LocalModel(adapter=folder / "tuned.gguf").identity(None)
    other = LocalModel(adapter=folder / "other.gguf").identity(None)
    assert (plain.name, tuned.name) == ("mine", "mine+tuned")
    assert plain.digest == sha256(folder / "mine.gguf")
    assert tuned.digest == f"{plain.digest}+{sha256(folder / 'tuned.gguf')}"
    assert len({plain.digest, tuned.digest, other.digest}) == 3


def test_an_adapter_that_is_trained_again_is_another_model(folder: Path) -> None:
    before = LocalModel(adapter=folder / "tuned.gguf").identity(None)
    (folder / "tuned.gguf").write_bytes(HEADER + b"trained for longer")
    assert LocalModel(adapter=folder / "tuned.gguf").identity(None) != before


@pytest.mark.usefixtures("folder")
def test_a_model_with_an_adapter_does_not_pass_for_the_one_without() -> None:
    tuned = LocalModel("+./tuned.gguf")
    assert tuned.identity("mine+tuned").name == "mine+tuned"
    with pytest.raises(SettingsError, match=r"'mine' was asked for, but .* 'mine\+tuned' runs"):
        tuned.identity("mine")


def test_the_name_of_a_model_may_name_its_adapter(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = Workflow(nodes=(Agent(id="one", role="You answer."),), edges=(), output="one")
    by_name = default_model(workflow, f"+{folder / 'tuned.gguf'}")
    assert by_name.identity(None) == LocalModel(adapter=folder / "tuned.gguf").identity(None)
    with pytest.raises(WeightsError, match="pull smollm2-135m"):
        LocalModel("135m+./tuned.gguf")
    with pytest.raises(SettingsError, match=r"'135m\+': no adapter after the \+"):
        LocalModel("135m+")


def test_a_file_of_ones_own_may_be_called_anything(folder: Path) -> None:
    assert LocalModel("a+b", path=folder / "mine.gguf").identity(None).name == "a+b"


def test_what_can_be_no_adapter_is_refused_by_name(folder: Path) -> None:
    (folder / "pickle.gguf").write_bytes(b"PK\3\4 and what a pickle holds")
    (folder / "short.gguf").write_bytes(b"GGUF")
    (folder / "folder.gguf").mkdir()
    os.mkfifo(folder / "pipe.gguf")
    for name, message in {
        "none": r"can't read the weights .*none\.gguf",
        "pickle": r"pickle\.gguf is no GGUF file",
        "short": r"short\.gguf is cut short: it has 4 bytes",
        "folder": r"folder\.gguf is no GGUF file: it is no file",
        "pipe": r"pipe\.gguf is no GGUF file: it is no file",
    }.items():
        with pytest.raises(WeightsError, match=message):
            LocalModel(adapter=folder / f"{name}.gguf")


# --- writing ---------------------------------------------------------------------------------

N_HEADS, N_KEY_HEADS = 4, 2


@pytest.fixture
def packages() -> Any:
    """PyTorch, Transformers and PEFT, where they and gguf are installed."""
    pytest.importorskip("gguf")
    pytest.importorskip("peft")
    return pytest.importorskip("torch")


def tiny_base(kind: str, folder: Path) -> Path:
    """A random model of two layers, without a tokenizer."""
    import transformers

    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KEY_HEADS,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def random_adapter(base: Path, folder: Path, **changes: Any) -> Path:
    """An adapter that changes queries and keys more than the rest."""
    import peft
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    settings = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{**settings, **changes})
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            is_turned = "q_proj" in name or "k_proj" in name
            torch.nn.init.normal_(parameter, std=0.3 if is_turned else 0.02)
    model.save_pretrained(str(folder))
    return folder


def written(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys and tensors of a GGUF file."""
    import gguf

    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor.data.copy() for tensor in reader.tensors}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_an_adapter_is_written_as_llama_cpp_wants_it(
    packages: Any, tmp_path: Path, kind: str
) -> None:
    from safetensors.numpy import load_file
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    from selector_training.adapters import write_gguf

    adapter = random_adapter(tiny_base(kind, tmp_path / "base"), tmp_path / "adapter")
    keys, tensors = written(write_gguf(adapter, tmp_path / "out" / "adapter.gguf"))
    assert keys["general.architecture"] == kind
    assert (keys["general.type"], keys["adapter.type"]) == ("adapter", "lora")
    assert keys["adapter.lora.alpha"] == 16.0

    trained = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == len(trained) == 2 * 7 * 2
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    n_heads = {"attn_q": N_HEADS, "attn_k": N_KEY_HEADS} if kind == "llama" else {}
    for theirs, ours in names.items():
        for part in "ab":
            found = tensors[f"blk.1.{theirs}.weight.lora_{part}"]
            whole = trained[f"base_model.model.model.layers.1.{ours}.lora_{part.upper()}.weight"]
            if part == "b" and theirs in n_heads:
                assert (found != whole).any()
                # What Transformers does when it reads such rows from a GGUF file.
                found = LlamaTensorProcessor()._reverse_permute_weights(found, n_heads[theirs])
            assert (found == whole).all(), theirs


def test_a_base_of_another_kind_is_refused_with_the_choices(packages: Any, tmp_path: Path) -> None:
    from selector_training.adapters import write_gguf

    adapter = random_adapter(tiny_base("mistral", tmp_path / "base"), tmp_path / "adapter")
    with pytest.raises(SettingsError, match=r"of kind 'mistral'.* for llama, qwen2"):
        write_gguf(adapter, tmp_path / "adapter.gguf")
    with pytest.raises(WeightsError, match="no language model can be read from"):
        write_gguf(adapter, tmp_path / "adapter.gguf", base=str(tmp_path))
    assert not (tmp_path / "adapter.gguf").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora: only plain LoRA"),
        ({"use_rslora": True}, "use_rslora: only plain LoRA"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern: only plain LoRA"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save: only plain LoRA"),
        ({"peft_type": "IA3"}, "peft_type: only LoRA"),
        ({"lora_alpha": "16"}, "lora_alpha: is missing"),
    ],
)
def test_more_than_a_plain_adapter_is_refused(
    packages: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    from selector_training.adapters import write_gguf

    adapter = random_adapter(tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **changes}), "utf-8")
    with pytest.raises(WeightsError, match=message):
        write_gguf(adapter, tmp_path / "adapter.gguf")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", 4, "is no LoRA part of a llama"),
        ("model.layers.9.self_attn.q_proj.lora_B.weight", 32, "is no LoRA part of a llama"),
        ("model.layers.0.self_attn.q_proj.lora_B.weight", 9, "has 9 rows for 4 heads"),
    ],
)
def test_a_tensor_that_llama_cpp_has_no_place_for_is_refused(
    packages: Any, tmp_path: Path, name: str, rows: int, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    from selector_training.adapters import write_gguf

    adapter = random_adapter(tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors[f"base_model.model.{name}"] = packages.zeros(rows, 8)
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(WeightsError, match=message):
        write_gguf(adapter, tmp_path / "adapter.gguf")


def test_an_adapter_in_a_pickle_is_not_read(packages: Any, tmp_path: Path) -> None:
    from selector_training.adapters import write_gguf

    adapter = random_adapter(tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors: no weights"):
        write_gguf(adapter, tmp_path / "adapter.gguf")


def test_the_command_writes_an_adapter_whose_base_has_moved(packages: Any, tmp_path: Path) -> None:
    from selector_training.cli import app

    adapter = random_adapter(tiny_base("llama", tmp_path / "base"), tmp_path / "adapter")
    (tmp_path / "base").rename(tmp_path / "moved")
    command = ["pack", str(adapter), "--out", str(tmp_path / "adapter.gguf")]
    assert isinstance(CliRunner().invoke(app, command).exception, WeightsError)
    shown = CliRunner().invoke(app, [*command, "--base", str(tmp_path / "moved")])
    assert shown.exit_code == 0, shown.output
    assert "adapter.gguf" in shown.stderr
    assert (tmp_path / "adapter.gguf").read_bytes().startswith(b"GGUF")


# --- the real thing --------------------------------------------------------------------------

TEXT = (
    "The train from Lisbon to Porto leaves at nine in the morning. "
    "The passengers wait on the platform and"
)
N_TOKENS = 400


@pytest.fixture
def small(packages: Any) -> Path:
    """The smallest known weights."""
    pytest.importorskip("xllamacpp")
    if not weights.is_present("smollm2-135m"):
        pytest.skip("the weights of smollm2-135m are not here: splice models pull smollm2-135m")
    return weights.path_of("smollm2-135m")


def served(small: Path, ids: list[int], adapter: Path | None = None) -> dict[int, float]:
    """Log-probabilities of the likeliest next tokens, by token, as llama.cpp has them."""
    server = start_server(small, name="small", threads=1, context=256, adapter=adapter)
    return likeliest(server, ids)


def likeliest(server: Server, ids: list[int]) -> dict[int, float]:
    import httpx2

    reply = httpx2.post(
        f"{server.base_url.removesuffix('/v1')}/completion",
        headers={"Authorization": f"Bearer {server.api_key}"},
        json={"prompt": ids, "n_predict": 1, "n_probs": 2 * N_TOKENS, "cache_prompt": False},
        timeout=120,
    )
    (first,) = reply.json()["completion_probabilities"]
    return {token["id"]: token["logprob"] for token in first["top_logprobs"]}


def computed(model: Any, ids: list[int]) -> Any:
    """Log-probabilities of the next token as PyTorch has them."""
    import torch

    with torch.inference_mode():
        return model.eval()(torch.tensor([ids])).logits[0, -1].log_softmax(-1)


def with_rows_in_llama_order(adapter: Path, out: Path, heads: dict[str, int]) -> Path:
    """An adapter whose file has the rows of queries and keys as PyTorch has them.

    They are put out of order as far as writing puts them in order.
    """
    from safetensors.torch import load_file, save_file

    rows = load_file(adapter / "adapter_model.safetensors")
    for name, values in rows.items():
        n = next((n for part, n in heads.items() if part in name and "lora_B" in name), None)
        if n is not None:
            pairs = values.reshape(n, len(values) // n // 2, 2, -1)
            rows[name] = pairs.transpose(1, 2).reshape(values.shape).contiguous()
    out.mkdir()
    save_file(rows, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    return out


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_moves_the_embedded_model_as_it_moves_the_one_it_was_trained_on(
    small: Path, tmp_path: Path
) -> None:
    import numpy
    import peft
    import transformers

    from selector_training.adapters import write_gguf
    from selector_training.language import unpack_gguf

    base = unpack_gguf(small, tmp_path / "base")
    adapter = random_adapter(base, tmp_path / "adapter")
    ids = transformers.AutoTokenizer.from_pretrained(base)(TEXT)["input_ids"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    before = computed(model, ids)
    expected = computed(peft.PeftModel.from_pretrained(model, str(adapter)), ids) - before

    right = write_gguf(adapter, tmp_path / "right.gguf")
    mixed = with_rows_in_llama_order(adapter, tmp_path / "mixed", {"q_proj": 9, "k_proj": 3})
    wrong = write_gguf(mixed, tmp_path / "wrong.gguf")
    plain = served(small, ids)

    def agreement(file: Path) -> float:
        """Correlation of what the adapter changes here and there, over the likeliest tokens."""
        tuned = served(small, ids, file)
        tokens = [token for token in plain if token in tuned][:N_TOKENS]
        assert len(tokens) >= N_TOKENS // 2
        here = [tuned[token] - plain[token] for token in tokens]
        there = [float(expected[token]) for token in tokens]
        return float(numpy.corrcoef(here, there)[0, 1])

    found = {"right": agreement(right), "wrong": agreement(wrong)}
    assert found["right"] > 0.95, found
    assert found["wrong"] < 0.7, found

    answers = [asyncio.run(answered(LocalModel(f"135m{end}"))) for end in ("", f"+{right}")]
    assert answers[0] != answers[1]
    random = tmp_path / "random.gguf"
    random.write_bytes(right.read_bytes()[:-4096])
    with pytest.raises(SettingsError, match=r"can't serve .* with .*random\.gguf"):
        asyncio.run(answered(LocalModel("135m", adapter=random)))


async def answered(model: LocalModel) -> str:
    request = Request(
        messages=(ChatMessage(role="user", content="Name a colour, and say where it is seen."),),
        settings=ModelSettings(max_tokens=16),
    )
    try:
        return (await model.complete(request, lambda *_: None)).text
    finally:
        await model.aclose()
