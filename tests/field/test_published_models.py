"""config.json and names of all tensors of published models: each is imported whole, or refused by what is lacking.

The files of `published/` were copied from directories on GitHub that hold a model as it is on Hugging Face's hub
(`source`), without weights. A name with `{}` stands for several: `[[first, last], ...]` for each place, or `of` a list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.convert import hf_weights
from neox.convert.from_hf import _config_keys, _stored_keys, read_family
from neox.convert.hf_weights import HFWeights
from neox.convert.verification import single_rank_plan
from neox.errors import ConversionError
from neox.families import FAMILIES
from neox.families.wrappers import text_network

MODELS = {path.stem: path for path in sorted((Path(__file__).parent / "published").glob("*.json"))}
REFUSED = {
    "falcon-40b": "RefinedWeb",
    "mimo-kor": "mimo",
    "nvidia-reason2": "qwen3_vl_text",
    "oasstpythia1.5brm": "gpt_neox_reward_model",
    "phi-2": "mixformer-sequential",
    "qwen-7b-chat-cantonese": "qwen ",
    "qwen3.5-18b-reap-a3b-coding": "qwen3_5_moe_text",
}
"""Name of a file -> the model type that the refusal names."""
PARAMETERS = {
    "gemma": 2_506_172_416,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.2-3b-huggingface-shard0": 3_212_749_824,
    "llama2-7b-chat-hf": 6_738_415_616,
    "mithoon-2b": 2_614_341_888,
    "mixtral-dolphin-v2.5": 46_702_792_704 + 2 * 2 * 4096,  # with two more tokens than Mixtral
    "qwen3.5-2b": 1_881_825_088,
}
"""Parameters: of Qwen3.5 2B as its index states them (`total_parameters`), of the others as counted here once."""


def names_of(tensors: dict[str, Any]) -> Iterator[str]:
    for pattern, numbers in tensors.items():
        if isinstance(numbers, dict):
            places: Any = numbers.get("only") or [[number] for number in numbers["of"]]
        else:
            places = product(*(range(first, last + 1) for first, last in numbers))
        for place in places:
            yield pattern.format(*place)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_published_model_has_a_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is missing, and none is unknown, but those of other networks and what transformers ignores."""
    published = json.loads(MODELS[name].read_text())
    outer = published["config"]
    inner = text_network(outer) if outer["model_type"] not in FAMILIES else None
    if name in REFUSED:
        with pytest.raises(ConversionError, match=REFUSED[name]) as refused:
            read_family(inner or outer, outer["model_type"])
        assert str(refused.value).count("\n") < 20
        return
    family, architecture, settings = read_family(inner or outer, outer["model_type"])
    files = dict.fromkeys(names_of(published["tensors"]), Path("model.safetensors"))
    monkeypatch.setattr(hf_weights, "_find_files", lambda directory: files)
    weights = HFWeights(Path(name), family, is_wrapped=inner is not None)
    further = architecture.mtp_num_layers
    keys = _config_keys(replace(architecture, mtp_num_layers=0), settings)
    layers = single_rank_plan(NeoXConfig.from_flat(keys), settings.vocab_size).layers
    found = [key for keys in _stored_keys(weights, layers, further).values() for key in keys]
    assert len(found) == len(set(found))
    if name in PARAMETERS:
        assert layers.numel == PARAMETERS[name]
