"""LoRA adapters for llama.cpp: what training saved, written as a GGUF file.

llama.cpp keeps the weights of the base as they are, coarse or not, and adds the adapter to what
they give. So one file of a base serves every adapter that was trained on it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from splice.errors import SettingsError, StoreError, WeightsError
from splice.files import read_text
from splice.language import ADAPTER_CONFIG, ADAPTER_WEIGHTS, require_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ARCHITECTURES: Final = ("llama", "qwen2")
"""Bases by `model_type` of Transformers, which is what GGUF calls them too."""

_TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MORE_THAN_LORA: Final = ("use_dora", "use_rslora", "alpha_pattern", "modules_to_save")
"""Settings of PEFT that a GGUF adapter has no place for."""


def write_gguf(adapter: str | Path, out: str | Path, *, base: str | None = None) -> Path:
    """Write a LoRA adapter as a GGUF file that llama.cpp loads beside the base.

    Args:
        adapter: folder of an adapter, as PEFT saves it.
        out: the file to write.
        base: the base, for its configuration: a folder, or a name on the Hub. None: as it was named
            in training.

    Returns:
        `out`.

    Raises:
        SettingsError: a package is missing, or the base is of a kind that is not written.
        StoreError: the file can't be written.
        WeightsError: the folder holds no plain LoRA adapter, or the base has no configuration.
    """
    require_extra()
    if find_spec("gguf") is None:
        raise SettingsError("writing GGUF files needs gguf: pip install gguf")
    adapter, out = Path(adapter), Path(out)
    settings = _settings_of(adapter)
    shape = _configuration(base or settings["base_model_name_or_path"])
    tensors = _named(_read_weights(adapter), adapter, shape)
    new = out.with_name(f"{out.name}.new")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(new, shape.model_type, float(settings["lora_alpha"]), tensors)
        os.replace(new, out)
    except OSError as error:
        raise StoreError(f"{out}: {error.strerror}") from None
    return out


def _settings_of(adapter: Path) -> Mapping[str, Any]:
    """`adapter_config.json` of a plain LoRA adapter."""
    path = adapter / ADAPTER_CONFIG
    try:
        settings = json.loads(read_text(path, WeightsError))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not JSON: {error}") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise WeightsError(f"{path}: peft_type: only LoRA adapters are written")
    for name in _MORE_THAN_LORA:
        if settings.get(name):
            raise WeightsError(f"{path}: {name}: only plain LoRA adapters are written")
    for name, kind in (("base_model_name_or_path", str), ("lora_alpha", int | float)):
        if not isinstance(settings.get(name), kind):
            raise WeightsError(f"{path}: {name}: is missing")
    return settings


def _configuration(base: str) -> Any:
    """Configuration of a base of a known kind."""
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise WeightsError(f"no language model can be read from {base!r}: {error}") from None
    if found.model_type not in ARCHITECTURES:
        raise SettingsError(
            f"{base!r} is of kind {found.model_type!r}; adapters are written for "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def _read_weights(adapter: Path) -> Mapping[str, NDArray[np.float32]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = adapter / ADAPTER_WEIGHTS
    try:
        return {name: tensor.float().numpy() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: no weights can be read from it: {error}") from None


def _named(
    weights: Mapping[str, NDArray[np.float32]], adapter: Path, shape: Any
) -> Mapping[str, NDArray[np.float32]]:
    """Weights by the names, and with the rows in the order, that llama.cpp expects."""
    import gguf

    (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == shape.model_type)
    names = gguf.get_tensor_name_map(kind, shape.num_hidden_layers)
    # What llama.cpp turns by pairs of neighbouring rows Transformers turns by halves of a head.
    n_heads = {}
    if shape.model_type == "llama":
        n_heads = {"attn_q": shape.num_attention_heads, "attn_k": shape.num_key_value_heads}
    found = {}
    for name, values in weights.items():
        match = _TENSOR.fullmatch(name)
        tensor = names.get_name(match[1]) if match else None
        if match is None or tensor is None or values.ndim != 2:
            raise WeightsError(
                f"{adapter / ADAPTER_WEIGHTS}: {name!r} is no LoRA part of a {shape.model_type}"
            )
        part = match[2].lower()
        n = n_heads.get(tensor.rpartition(".")[2])
        if part == "b" and n is not None:
            if len(values) % (2 * n):
                raise WeightsError(
                    f"{adapter / ADAPTER_WEIGHTS}: {name!r} has {len(values)} rows for {n} heads"
                )
            values = rows_by_pairs(values, n)
        found[f"{tensor}.weight.lora_{part}"] = values
    return found


def rows_by_pairs(values: NDArray[np.float32], n_heads: int) -> NDArray[np.float32]:
    """Rows of each head in the order in which llama.cpp keeps them.

    Args:
        values: (n_heads * head_dim, n) with the first half of a head's rows before the second.
        n_heads: heads that the rows belong to.

    Returns:
        The same rows; of each head 0, d/2, 1, d/2 + 1, and so on.
    """
    halves = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _write(path: Path, kind: str, alpha: float, tensors: Mapping[str, NDArray[np.float32]]) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, kind)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name in sorted(tensors):
        writer.add_tensor(name, np.ascontiguousarray(tensors[name]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
