"""Adapters of families whose code is in the model's folder: results are the merged reference's."""

from types import SimpleNamespace

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.peft.lora import adapted_shapes, read_adapter
from qserve.lora.request import LoRARequest
from qserve.model.model_config import family_of
from tests.adapters import write_adapter
from tests.own_code.models import TINY_MODELS
from tests.own_code.references import Reference
from tests.qserve.lora.test_lora_tokens import assert_is, engine, run

FEW = ("internlm2", "ling_2")  # queries, keys and values by KV head; one after the other


class Merged(Reference):
    """The reference with an adapter in its weights, called as transformers' models are."""

    def __init__(self, folder, adapter=None):
        super().__init__(folder)
        reader = CheckpointReader(folder)
        shapes = adapted_shapes(family_of(reader.config), reader.config)
        pairs = read_adapter(adapter, shapes).pairs if adapter else {}
        for name, pair in pairs.items():
            self.tensors[f"{name}.weight"] += pair.delta()

    def __call__(self, ids):
        return SimpleNamespace(logits=self.logits(ids[0].tolist())[None])


@pytest.mark.parametrize(
    "name", [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in TINY_MODELS]
)
def test_logits_equal_merged_reference(own_code, tmp_path, name):
    folder = own_code(name)
    adapters = [
        write_adapter(folder, tmp_path / "small", rank=2),
        write_adapter(folder, tmp_path / "large", rank=8, seed=1),
    ]
    llm = engine(folder)
    loras = [LoRARequest(path.name, n, str(path)) for n, path in enumerate(adapters, start=1)]
    found = run(llm, [*loras, None])
    for adapter, each in zip([*adapters, None], found, strict=True):
        assert_is(Merged(folder, adapter), each)
    assert not torch.allclose(*(torch.tensor(each[1]) for each in found[1:]), atol=1e-2)
