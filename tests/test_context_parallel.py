"""Context parallelism: exact attention over parts of sequences, documents in them, and a rank's share of the memory."""

import json

import pytest
import torch

from conftest import forked, torchrun
from engine.context_parallel import flash, flash_backward

ONE = {"single": {}}
MESHES: dict = {2: {"cp2": dict(cp=2), "tp2": dict(tp=2)},
          4: {"cp4": dict(cp=4), "cp2-fsdp2": dict(cp=2, parallel="fsdp", total_batch_size=2 * 3 * 32), "cp2-tp2": dict(cp=2, tp=2)}}


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_a_sequence_keep_its_positions(size):
    """Of whole rows, and of documents: what the ranks hold together is every token once, each at its own position."""
    from types import SimpleNamespace

    from engine.attention import Documents
    from engine.context_parallel import Part

    T, documents = 32, Documents([3, 7, 22, 32, 1, 31], 3)
    for given, positions in ((None, torch.arange(T)[None]), (documents, documents.positions)):
        parts = [Part(SimpleNamespace(size=size, rank=rank), T, given) for rank in range(size)]
        assert torch.cat([part.at for part in parts]).sort().values.tolist() == list(range(T))
        for part in parts:
            assert torch.equal(part.positions, positions[:, part.at]), part.at
            for _, own, start, first in part.runs:
                assert part.at[own].tolist() == list(range(first, first + own.stop - own.start)) and start <= first


@pytest.mark.quick
@pytest.mark.parametrize("keys, causal", [(24, True), (40, False)])
def test_a_gpus_kernels_are_called_as_torch_declares_them(keys, causal):
    """On the meta device, which goes by the operators' own declarations: their arguments and the shapes of what comes back."""
    q, k = (torch.empty(2, 4, n, 16, dtype=torch.bfloat16, device="meta") for n in (24, keys))
    out, lse = flash(q, k, k, causal)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    grads = flash_backward(out, q, k, k, out, lse, causal)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    names = [a.name for a in torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema.arguments]
    assert names == ["grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
                     "philox_seed", "philox_offset", "scale"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_parts_is_that_over_the_whole(ranks, tmp_path):
    """Against scores written out in float32: queries in groups, documents that cross the cuts, padding."""
    result = forked(ranks, "tests/ranks.py", "attention", tmp_path)
    assert result.code == 0, result.err
    for rank in range(ranks):
        found = json.loads((tmp_path / f"attention-{ranks}-{rank}.json").read_text())
        assert len(found) == 8
        for case, error in found.items():
            assert error < (0.05 if "bfloat16" in case else 5e-6), (rank, case)


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for ranks, meshes in {1: ONE, **MESHES}.items():
        (folder / "mesh.json").write_text(json.dumps(meshes))
        result = forked(ranks, "tests/ranks.py", "documents", folder)
        assert result.code == 0, result.err
    return folder


@pytest.mark.parametrize("shape", ["gpt2", "qwen3"])
@pytest.mark.parametrize("mesh", [name for meshes in MESHES.values() for name in meshes])
def test_packed_documents_have_one_gradient_on_every_mesh(mesh, shape, batches):
    """Records that share rows and cross the ranks' cuts, padding, and labels on so few tokens that some ranks have none."""
    one, other = (torch.load(batches / f"{name}-{shape}-0.pt", weights_only=True) for name in ("single", mesh))
    for all_labels, ours in zip(one, other):
        assert ours["loss"] == pytest.approx(all_labels["loss"], rel=1e-6) and ours["norm"] == pytest.approx(all_labels["norm"], rel=1e-5)
        for name, gradient in all_labels["gradients"].items():
            assert torch.allclose(ours["gradients"][name], gradient, rtol=1e-4, atol=1e-5), name


def test_a_rank_keeps_a_quarter_of_the_activations_and_32768_tokens_fit(tmp_path):
    """One process would hold full logits of 32,768 x 50,304 float32, 6.6 GB, and a mask of 32,768 x 32,768 bool, 1.1 GB."""
    result = torchrun(4, "tests/ranks.py", "context_memory", tmp_path)
    assert result.code == 0, result.err
    for rank in range(4):
        m = json.loads((tmp_path / f"context-{rank}.json").read_text())
        assert m["part"] == pytest.approx(m["whole"] / 4, rel=0.15)
        assert m["peak"] < 400e6  # 512 tokens' logits take half of it; seen: 200 to 232 MB
        assert m["loss"] == pytest.approx(10.83, abs=0.1) and 0 < m["norm"] < 10  # the first values know nothing: log(50304)
