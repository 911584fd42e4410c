"""The loss picture: what is drawn, and the messages when nothing can be."""

import json
import sys

import numpy as np
import pytest

from orthros_jax.errors import UserError
from orthros_jax.training import plot


def make_run(folder, steps=200, flops=True):
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = {"step": step, "loss": 2 + 5 / step, "tokens": 1000 * step}
            if flops:
                line["flops"] = 1e9 * step
            if step == 10:
                line["loss"] = None  # a step that was not finite
            file.write(json.dumps(line) + "\n")
            if step % 50 == 0:
                file.write(json.dumps({"step": step, "eval_loss": 2.5}) + "\n")
    return str(folder)


def saved_figure(monkeypatch):
    pyplot = plot._import_pyplot()
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    return figures


def test_draws_both_panels(tmp_path, monkeypatch, capsys):
    figures = saved_figure(monkeypatch)
    first = make_run(tmp_path / "a" / "orthros")
    second = make_run(tmp_path / "b" / "orthros", flops=False)
    output = tmp_path / "loss.png"
    plot.main([first, second, "--output", str(output)])
    assert output.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["loss.png"]
    assert capsys.readouterr().out == (
        f"{second} has no FLOPs in its metrics.jsonl: it is absent from the right panel\nwrote {output}\n"
    )
    left, right = figures[0].axes
    assert (left.get_xlabel(), right.get_xlabel()) == ("training tokens", "training FLOPs")
    drawn = [line for line in left.lines if len(line.get_xdata())]
    assert len(drawn) == 6  # raw, smoothed and held-out loss of two runs
    raw, smoothed, held_out = drawn[:3]
    assert len(raw.get_xdata()) == len(smoothed.get_xdata()) == 199
    np.testing.assert_array_equal(held_out.get_xdata(), [50_000, 100_000, 150_000, 200_000])
    np.testing.assert_array_equal(held_out.get_ydata(), [2.5] * 4)
    assert len([line for line in right.lines if len(line.get_xdata())]) == 3
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels == [
        "a/orthros",
        "a/orthros, held out: 2.500 at the end",
        "b/orthros",
        "b/orthros, held out: 2.500 at the end",
    ]


def test_smoothing_is_a_running_mean():
    values = np.random.default_rng(0).normal(size=500)
    smooth = plot._smooth(values)
    for index in (0, 3, 250, 499):
        window = values[max(index - 5, 0) : index + 6]
        assert smooth[index] == pytest.approx(window.mean())
    assert plot._smooth(np.array([3.0])) == pytest.approx([3.0])


def test_run_without_any_flops(tmp_path, monkeypatch):
    figures = saved_figure(monkeypatch)
    run = make_run(tmp_path / "run", flops=False)
    assert plot.draw([run], tmp_path / "x.png") == [run]
    assert [text.get_text() for text in figures[0].axes[1].texts] == ["no flops in metrics.jsonl"]


def test_one_step_and_a_torn_line_can_be_drawn(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    plot.draw([run + "/metrics.jsonl"], tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_missing_run(tmp_path):
    with pytest.raises(UserError) as caught:
        plot.main([str(tmp_path / "absent"), "--output", str(tmp_path / "x.png")])
    assert str(caught.value) == (
        f"{tmp_path / 'absent'} is not a run: {tmp_path / 'absent'} does not exist; give the run_dir of a training run"
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty is not a run: .*metrics\.jsonl does not exist"):
        plot.main([str(tmp_path / "empty")])
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        '{"step": 1, "loss": null, "tokens": 10}\n',
        '{"step": 1, "loss": NaN, "tokens": 10}\n',
        '{"step": 1, "loss": 1e999, "tokens": 10}\n',
        "[" * 200_000,
    ],
)
def test_run_without_losses(tmp_path, text):
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        plot.draw([str(tmp_path)], tmp_path / "x.png")
    assert str(caught.value) == (f"{file} holds no training loss yet; wait for the run's first report or leave it out")


def test_a_name_that_legends_leave_out_gets_its_folder(tmp_path):
    assert plot._labels([str(tmp_path / "runs" / "_first"), str(tmp_path / "runs" / "b")]) == ["runs/_first", "runs/b"]


def test_a_picture_without_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^cannot write the picture \.: name a file$"):
        plot.draw([make_run(tmp_path / "run")], "")


@pytest.mark.parametrize("name", ["absent/x.png", "x.unknown"])
def test_picture_that_cannot_be_written(tmp_path, name):
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="cannot write the picture"):
        plot.draw([run], tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_matplotlib_absent(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError) as caught:
        plot.draw([run], tmp_path / "x.png")
    assert str(caught.value) == "plot needs matplotlib; run `pip install matplotlib`"
