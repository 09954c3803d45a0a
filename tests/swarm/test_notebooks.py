"""The notebooks of examples/ run from top to bottom; `make test-trainers` has what executes them."""

from pathlib import Path

import pytest


@pytest.mark.lane("trainers")
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "replaced"),
    [
        ("classification", {"STEPS = 40": "STEPS = 4"}),
        ("persona", {"= 20, 0.002": "= 4, 0.002", "demo_model_path": "embedded_model_path"}),
        (
            "persona",
            {
                "= 20, 0.002": "= 4, 0.002",
                "demo_model_path": "embedded_model_path",
                'TRAINER = "hf"': 'TRAINER = "sft"',
            },
        ),
    ],
)
def test_it_runs_to_its_end(name: str, replaced: dict[str, str], repo_root: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(repo_root / "examples" / f"{name}.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    for old, new in replaced.items():
        assert old in parameters.source
        parameters.source = parameters.source.replace(old, new)
    resources = {"metadata": {"path": str(repo_root / "examples")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    (curve,) = (output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", ()))
    assert "step 4 of 4: loss" in "".join(curve)  # one picture, which was replaced with each step
    assert "'loss'" not in "".join(output.get("text", "") for output in outputs)


@pytest.mark.lane("trainers")
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_three_homes(repo_root: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(repo_root / "examples" / "together.ipynb", as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = parameters.source.replace("demo_model_path", "embedded_model_path").replace("= 40", "= 4")
    resources = {"metadata": {"path": str(repo_root / "examples")}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    (bars,) = (output.data["image/svg+xml"] for output in outputs if "image/svg+xml" in output.get("data", ()))
    assert "".join(bars).count("<rect") == 1 + 4 * 3
    assert "1 round, 3 homes in the last one" in "".join(output.get("text", "") for output in outputs)
