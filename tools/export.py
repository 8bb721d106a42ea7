"""Export the notebooks to modules, with the meaning of the parameters in the docstrings (see `args_sections`).

    python tools/export.py             notebooks -> modules, like `nbdev_export`, but with the sections
    python tools/export.py --update    modules -> notebooks, like `nbdev_update`, but without the sections
"""
import re
import sys

from args_sections import ArgsError, with_args, without_args
from execnb.nbio import read_nb
from nbdev.config import add_init, get_config
from nbdev.doclinks import _build_modidx, _iter_py_cells, nbglob
from nbdev.export import nb_export
from nbdev.sync import _update_nb


def export():
    "Write every module and the index anew."
    def add_args(cell):
        if cell.cell_type == "code" and any(d.startswith("export") for d in cell.directives_): cell.source = with_args(cell.source)

    for path in nbglob(as_path=True).sorted("name"):
        try: nb_export(path, procs=[add_args])
        except ArgsError as e: raise ArgsError(f"{path.name}: {e}") from None
    add_init(get_config().lib_path)
    _build_modidx()


def with_packages_named(code, path):
    "The code of the module `path` with `from package import x` for `from .. import x`, which nbdev would take for `from . import x`."
    def named(match): return match[1] + ".".join(path.parts[:-len(match[2])]) + match[3]
    return re.sub(r"(?m)^(\s*from )(\.+)( import )", named, code)


def update():
    "Carry what was edited in modules back into the cells of their notebooks. Nothing is written to a notebook that would not export."
    lib = get_config().lib_path
    for path in sorted(lib.rglob("*.py")):
        if path.name.startswith("_"): continue
        cells = list(_iter_py_cells(path))
        if not cells: continue  # written by hand
        notebook = cells[0].nb_path  # one module, one notebook
        originals = {c.id: c.source for c in read_nb(notebook).cells}
        for cell in cells:
            code = re.sub(r"\A(#\|.*\n)+", "", cell.code)  # `_update_nb` adds all directives of the cell, also those that are exported
            cell.code = without_args(with_packages_named(code, path.relative_to(lib.parent)), originals.get(cell.cell_id, ""))
            with_args(cell.code)
        _update_nb(notebook, cells, lib.parent)


if __name__ == "__main__":
    try: update() if "--update" in sys.argv[1:] else export()
    except ArgsError as e: sys.exit(str(e))
