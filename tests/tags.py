"""Which tags a page opens, which it leaves open, and what its pictures hold."""

from html.parser import HTMLParser


class Tags(HTMLParser):
    """Fed with a page: `open` tags, the attributes of its `images`, the classes of its table `rows`."""

    def __init__(self):
        super().__init__()
        self.open, self.images, self.rows = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.images.append(dict(attrs))
        elif tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append(dict(attrs).get("class"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
