"""The page and the headers it is served with. It holds no secret and may be fetched without a key; the data that it asks for may
not."""

import base64
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent


def load_page() -> tuple[str, dict[str, str]]:
    """Return the HTML, and headers that let it run its own script, ask its own server and nothing else."""
    html, style, script = (
        (_FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")
    )
    html = html.replace("/* page.css */", style).replace("/* page.js */", script)
    script = html.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return html, {
        "Content-Security-Policy": f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
