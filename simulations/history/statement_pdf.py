"""The page of a statement as PDF, by fpdf2; fonts are DejaVu's, which come with matplotlib."""

import datetime
import re
import stat
from pathlib import Path
from typing import Any

from privacy import durable
from server.config.load import ConfigError

SIZES = (9.0, 8.5, 8.0, 7.5, 7.0)
"""Points; the largest that fits one page is taken, else the least."""


def find_fpdf() -> Any:
    """Import fpdf2; ConfigError where it is not installed."""
    try:
        import fpdf
    except ImportError:
        raise ConfigError("--pdf needs fpdf2, which is not installed: pip install 'lacquer-dp[pdf]'") from None
    return fpdf


def write_pdf(page: Path) -> Path:
    """Write the HTML page of a statement as PDF beside it, with the same permissions; on one A4 page where it fits."""
    html, path = page.read_text(encoding="utf-8"), page.with_suffix(".pdf")
    for size in SIZES:
        made = _laid_out(html, size)
        if made.pages_count == 1:
            break
    durable.write(path, bytes(made.output()), mode=stat.S_IMODE(page.stat().st_mode))
    return path


def _laid_out(page: str, size: float) -> Any:
    import matplotlib

    fpdf = find_fpdf()
    made, text_style = fpdf.FPDF(format="A4"), fpdf.fonts.TextStyle
    today = datetime.datetime.now(datetime.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    made.set_creation_date(today)  # a time of day could tell how long the run took
    made.set_margin(16)
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for style, name in (("", "DejaVuSans"), ("B", "DejaVuSans-Bold"), ("I", "DejaVuSans-Oblique")):
        made.add_font("DejaVu", style, fonts / f"{name}.ttf")
    made.set_font("DejaVu", size=size)
    made.add_page()
    heading = {"font_family": "DejaVu", "color": "#1a1a1a", "b_margin": 1}
    styles = {
        "h1": text_style(**heading, font_size_pt=1.6 * size, font_style="B", t_margin=1),
        "h2": text_style(**heading, font_size_pt=1.2 * size, font_style="B", t_margin=3),
        "blockquote": text_style(
            font_family="DejaVu", font_size_pt=1.1 * size, color="#1a1a1a", t_margin=1, b_margin=1
        ),
        "code": fpdf.fonts.FontFace(family="DejaVu"),
    }
    made.write_html(_plainer(page), font_family="DejaVu", tag_styles=styles, ul_bullet_char="•", li_prefix_color=0)
    return made


def _plainer(page: str) -> str:
    """The page's body, with tables as fpdf2 reads them: a heading of a row is a bold cell, the first column narrow."""
    (body,) = re.findall(r"<body[^>]*>(.*)</body>", page, re.DOTALL)
    body = body.replace('<th scope="row">', "<td><b>").replace("</th><td", "</b></td><td")
    body = body.replace("<td>", '<td align="left">')
    first_row = r'(<table class="facts">.*?<tr>)<td align="left">(.*?)</td><td'
    body = re.sub(first_row, r'\1<td width="18%" align="left">\2</td><td width="82%"', body, count=1, flags=re.DOTALL)
    return re.sub(r" As PDF: [^<]*", "", body)
