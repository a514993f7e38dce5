"""The pages of this package's templates, each whole in one file."""

import tomllib
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from simulations.report.notation import without_folders


def render_template(template: str, **values: Any) -> str:
    """Render a template in `pages.toml` as HTML text; a value that it lacks is an error.

    No page says where things lie on the machine: absolute paths are cut, but for those in what is already escaped.
    """
    pages = Environment(
        loader=DictLoader(tomllib.loads(Path(__file__).with_name("pages.toml").read_text(encoding="utf-8"))),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=_shown,
    )
    return pages.get_template(template).render(**values)


def _shown(value: object) -> object:
    return without_folders(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
