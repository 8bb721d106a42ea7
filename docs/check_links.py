"Every link and picture inside the built site leads somewhere, anchors included, and nothing is loaded from elsewhere."

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse


class Page(HTMLParser):
    "The ids, the links and the loaded files of a page."

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ("id", "name") if a.get(k)}
        if tag == "a" and a.get("href"):
            self.links.append(a["href"])
        self.loads += [
            a[k]
            for k in ("src", "href")
            if a.get(k) and (k == "src" or tag == "link" and "canonical" not in a.get("rel", ""))
        ]


def problem(link, path, page, pages):
    "What is wrong with a link of a page, or None."
    url, anchor = urldefrag(link)
    if urlparse(url).scheme or url.startswith("//"):
        return (
            "is loaded from elsewhere"
            if link in page.loads and not url.startswith("data:")
            else None
        )
    to = (path.parent / unquote(url.split("?")[0])).resolve() if url else path
    if to.is_dir():
        to /= "index.html"
    if not to.exists():
        return "leads nowhere"
    return (
        "has no such anchor"
        if anchor and to in pages and unquote(anchor) not in pages[to].ids
        else None
    )


def main(site):
    site = Path(site).resolve()
    pages = {
        p: Page(p)
        for p in sorted(site.rglob("*.html"))
        if "_static" not in p.relative_to(site).parts
    }
    bad = [
        f"{path.relative_to(site)}: {link} {found}"
        for path, page in pages.items()
        for link in page.links + page.loads
        if (found := problem(link, path, page, pages))
    ]
    print(
        *bad,
        f"{len(pages)} pages, {sum(len(p.links) for p in pages.values())} links, {len(bad)} broken",
        sep="\n",
    )
    return bool(bad) or not pages


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
