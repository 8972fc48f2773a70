"""What needs a CUDA device; skipped without one."""

import pytest
import torch

from conftest import curve, run_script, tensors, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_gpu_draws_the_cpus_curve_within_its_precision(dtype, data, tmp_path):
    train(tmp_path / "cpu", data, max_iters=10)
    train(tmp_path / "cuda", data, max_iters=10, device="cuda", dtype=dtype, compile=False)
    bound = {"float32": 5e-3, "bfloat16": 5e-2, "float16": 2e-2}[dtype]
    for a, b in zip(curve(tmp_path / "cpu").values(), curve(tmp_path / "cuda").values()):
        assert abs(a[0] - b[0]) < bound


def test_compiled_blocks_draw_the_eager_curve(data, tmp_path):
    for compiled in (False, True):
        train(tmp_path / str(compiled), data, max_iters=10, device="cuda", compile=compiled, dtype="bfloat16")
    for a, b in zip(curve(tmp_path / "False").values(), curve(tmp_path / "True").values()):
        assert abs(a[0] - b[0]) < 5e-2


def test_a_run_goes_on_from_gpu_to_cpu_and_says_so(data, tmp_path):
    train(tmp_path / "run", data, max_iters=5, device="cuda", dtype="float32", lr_decay_iters=10)
    result = train(tmp_path / "run", data, max_iters=10, device="cpu", lr_decay_iters=10)
    assert "its last bits may differ" in result.out and len(curve(tmp_path / "run")) == 10


def test_saving_changes_nothing_on_a_gpu(data, tmp_path):
    train(tmp_path / "whole", data, max_iters=8, device="cuda", dtype="float32")
    train(tmp_path / "parts", data, max_iters=4, device="cuda", dtype="float32", lr_decay_iters=8)
    train(tmp_path / "parts", data, max_iters=8, device="cuda", dtype="float32", lr_decay_iters=8)
    for a, b in zip(curve(tmp_path / "whole").values(), curve(tmp_path / "parts").values()):
        assert a[0] == pytest.approx(b[0], rel=1e-4)  # not to the bit: embeddings' gradients are summed in any order there
    assert tensors(tmp_path / "whole", 8).keys() == tensors(tmp_path / "parts", 8).keys()


def test_a_gpu_samples_with_a_cache(data, tmp_path):
    train(tmp_path / "run", data, max_iters=5, device="cuda")
    result = run_script("sample.py", f"--out_dir={tmp_path / 'run'}", "--max_new_tokens=40", "--num_samples=2", "--device=cuda")
    assert result.code == 0, result.err
