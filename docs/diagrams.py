"""Draws the Mermaid diagrams of the pages as SVG: ``python -m docs.diagrams``.

GitHub draws the diagrams itself. The site shows these pictures, so that a reader's browser loads
neither Mermaid (3.5 MB) nor another host. A picture's name is the digest of its diagram; pictures
of other diagrams are removed. Requires npm, which fetches Mermaid, and Chromium.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from docs.pictures import DIAGRAMS, diagram_name, diagrams

DOCS = Path(__file__).parent
_MERMAID = "mermaid@11.17.2"
_CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    " --disable-sync --disable-background-networking --disable-component-update"
)
_FONT = 'system-ui, "Segoe UI", Helvetica, Arial, sans-serif'

_PARTS = (
    "primaryColor primaryTextColor primaryBorderColor lineColor titleColor clusterBkg clusterBorder"
    " edgeLabelBackground labelBackground actorBkg activationBkgColor noteBkgColor noteTextColor"
    " background"
)
_LIGHT = (
    "#ffffff #1e293b #94a3b8 #64748b #1e293b #f1f5f9 #cbd5e1 #ffffff #ffffff #dbeafe #dbeafe"
    " #fef3c7 #1e293b #ffffff"
)
_DARK = (
    "#1e293b #e2e8f0 #64748b #94a3b8 #e2e8f0 #172033 #334155 #1e2129 #1e2129 #1e3a5f #1e3a5f"
    " #713f12 #e2e8f0 #1e2129"
)
_COLOURS = {
    name: {"darkMode": name == "dark", **dict(zip(_PARTS.split(), values.split(), strict=True))}
    for name, values in (("light", _LIGHT), ("dark", _DARK))
}

_PAGE = """<!doctype html><meta charset="utf-8"><div id="work"></div><pre id="drawn"></pre>
<script src="mermaid.min.js"></script>
<script>
(async () => {
  const drawn = {};
  try {
    for (const [name, diagram, theme] of WANTED) {
      mermaid.initialize({
        startOnLoad: false, theme: "base", themeVariables: theme, fontFamily: FONT,
        htmlLabels: false, flowchart: {htmlLabels: false, wrappingWidth: 320},
        deterministicIds: true, securityLevel: "strict",
      });
      const work = document.getElementById("work");
      const {svg} = await mermaid.render("d" + name.replace(".", "-"), diagram, work);
      const parsed = new DOMParser().parseFromString(svg, "image/svg+xml");
      drawn[name] = new XMLSerializer().serializeToString(parsed.documentElement);
    }
  } catch (error) {
    drawn.error = String(error);
  }
  document.getElementById("drawn").textContent = JSON.stringify(drawn);
})();
</script>
"""


def wanted() -> dict[str, str]:
    """The diagrams of all pages by the names of their pictures."""
    pages = (page.read_text() for page in sorted(DOCS.rglob("*.md")))
    return {diagram_name(one): one for page in pages for one in diagrams(page)}


def draw(known: dict[str, str], scratch: Path) -> dict[str, str]:
    """The SVG of each diagram in both colours, by name and colour.

    Raises:
        RuntimeError: Mermaid or Chromium failed.
    """
    packed = subprocess.run(
        ["npm", "pack", "--silent", _MERMAID], cwd=scratch, check=True, capture_output=True
    )
    with tarfile.open(scratch / packed.stdout.decode().split()[-1]) as archive:
        script = archive.extractfile("package/dist/mermaid.min.js")
        assert script is not None
        (scratch / "mermaid.min.js").write_bytes(script.read())
    cases = [
        [f"{name}.{colour}", diagram, theme]
        for name, diagram in known.items()
        for colour, theme in _COLOURS.items()
    ]
    page = scratch / "page.html"
    text = _PAGE.replace("WANTED", json.dumps(cases).replace("</", "<\\/"))
    page.write_text(text.replace("FONT", json.dumps(_FONT)))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("could not draw the diagrams: chromium is not on the PATH; install it")
    done = subprocess.run(
        [
            browser,
            *_CHROMIUM.split(),
            f"--user-data-dir={scratch / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    (found,) = re.findall(r'<pre id="drawn">(.*?)</pre>', done.stdout, re.DOTALL)
    drawn: dict[str, str] = json.loads(html.unescape(found) or '{"error": "Chromium ended early"}')
    if "error" in drawn:
        raise RuntimeError(f"could not draw the diagrams: {drawn['error']}")
    return drawn


def main() -> None:
    """Draw the diagrams that lack a picture, and remove pictures of other diagrams."""
    folder, known = DOCS / DIAGRAMS, wanted()
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.svg"):
        if path.name.partition(".")[0] not in known:
            path.unlink()
    missing = {
        name: diagram for name, diagram in known.items() if not list(folder.glob(f"{name}.*"))
    }
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="diagrams-") as scratch:
        for name, picture in draw(missing, Path(scratch)).items():
            (folder / f"{name}.svg").write_text(picture + "\n")


if __name__ == "__main__":
    main()
