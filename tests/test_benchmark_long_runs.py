"""The benchmarks of checkpoints and of large data, on small ones."""

import json

from benchmarks import checkpoint, large_data


def test_checkpoint(tmp_path, capsys, monkeypatch):
    # Compiling takes far longer than running.
    monkeypatch.setattr(checkpoint, "compiler_options", lambda mesh: {"xla_backend_optimization_level": 0})
    checkpoint.main(["--folder", str(tmp_path), "--steps", "1", "--results", str(tmp_path / "results")])
    result = json.loads((tmp_path / "results" / "checkpoint_cpu.json").read_text())
    # Parameters and both moments in float32, and a few counters.
    assert 12 * result["parameters"] < result["state_bytes"] < 12 * result["parameters"] + 64
    assert result["file_bytes"] > result["state_bytes"]
    assert len(result["saves"]) == 2
    for save in result["saves"]:
        assert 0 < save["stall_seconds"] <= save["complete_seconds"]
    assert result["restore_seconds"] > 0
    assert "the loop waits" in capsys.readouterr().out
    # The saves are gone.
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_large_data(tmp_path):
    large_data.main(["--tokens", "20e6", "--shards", "3", "--seconds", "0.05", "--results", str(tmp_path)])
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert result["tokens"] == 20_000_000
    assert abs(result["tokens"] / result["documents"] - 1000) < 100
    assert list(result["positions"]) == ["start", "middle", "end"]
    assert all(position["tokens_per_second"] > 0 for position in result["positions"].values())
