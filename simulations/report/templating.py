"""The pages of this package's templates, each whole in one file."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def rendered(template: str, **values: Any) -> str:
    """The HTML text of a template in `templates/`; a value that it lacks is an error."""
    pages = Environment(
        loader=PackageLoader("simulations.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return pages.get_template(template).render(**values)
