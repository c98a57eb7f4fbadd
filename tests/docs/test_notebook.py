"""The notebook of the examples, executed by a kernel."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import interpreter

pytest.importorskip("ipykernel", reason="a kernel needs ipykernel")
nbclient = pytest.importorskip("nbclient", reason="notebooks are executed by nbclient")

pytestmark = pytest.mark.timeout(300)

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def execute(notebook: Any, folder: Path) -> dict[str, list[Any]]:
    """Run all cells in a kernel that has torch imported; return the outputs of each by its id."""
    import ipykernel_launcher
    from jupyter_client.manager import AsyncKernelManager

    class PreloadedKernel(AsyncKernelManager):
        def format_kernel_cmd(self, extra_arguments: list[str] | None = None) -> list[str]:
            program = [*interpreter(starts_ranks=True), str(ipykernel_launcher.__file__)]
            return [*program, "-f", self.connection_file]

    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(
        notebook, timeout=280, resources=resources, kernel_manager_class=PreloadedKernel
    )
    done = client.execute()
    return {cell.id: cell.outputs for cell in done.cells if cell.cell_type == "code"}


def text_of(outputs: list[Any]) -> str:
    return "".join(one.text for one in outputs if one.output_type == "stream")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_a_cell_is_trained_by_two_ranks_with_a_bar_and_its_figures_are_shown(
    tmp_path: Path,
) -> None:
    import nbformat

    # A kernel that believes that it is a test leaves what its ranks print to the terminal.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    os.environ["IPYTHONDIR"] = os.environ["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    found = execute(nbformat.read(NOTEBOOK, as_version=4), tmp_path)
    said = text_of(found["train"])
    assert "2 ranks" in said
    assert "\r" in said
    assert "━" in said
    assert "epoch 8/8" in said
    (frame,) = found["frame"]
    assert "validation/accuracy" in frame.data["text/html"]
    assert text_of(found["use"]).startswith("looks like a ")
    assert text_of(found["again"]).startswith("True ")
    assert "% of 359 test digits" in text_of(found["answer"])
