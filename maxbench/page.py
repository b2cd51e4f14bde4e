"""The report as one HTML file: figures, plots drawn as SVG, no network."""


def html(rows, s, names) -> str:
    return ""
