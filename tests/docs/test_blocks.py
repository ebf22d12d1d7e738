"""The reader of the documents' blocks finds them all, and says so when one is malformed."""

from __future__ import annotations

import pytest

from docs.blocks import all_blocks, blocks

PAGE = """\
# Title

```console
$ fourfold --version
0.1.0
$ fourfold plan \\
> --json
```

<!-- run instead: fourfold train a.yaml train.steps=2 -->
<!-- exits: 1 -->
```bash
fourfold train a.yaml
```

<!-- not run: needs a GPU -->
```python
print(1)
```

<!-- file: a.py -->
```python
x = 1
```

```yaml
a: 1
```
"""


def test_blocks_are_found_with_their_marks() -> None:
    found = blocks("page.md", PAGE)
    assert [block.language for block in found] == ["console", "bash", "python", "python", "yaml"]
    assert [block.line for block in found] == [3, 12, 17, 22, 26]
    assert [block.runs for block in found] == [True, True, False, False, False]
    assert found[1].marks == {"run instead": "fourfold train a.yaml train.steps=2", "exits": "1"}


def test_what_is_run() -> None:
    console, bash, python, *_ = blocks("page.md", PAGE)
    assert console.script == "fourfold --version\nfourfold plan \\\n--json"
    assert bash.script == "fourfold train a.yaml train.steps=2"
    assert python.script == "print(1)\n"


@pytest.mark.parametrize("text", ["```bash\nls\n", "<!-- exits: 1 -->\n\ntext\n"])
def test_a_malformed_page_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"page.md:\d"):
        blocks("page.md", text)


def test_every_document_can_be_read() -> None:
    shown = all_blocks()
    assert any(block.document == "README.md" and block.runs for block in shown)
    assert any(block.document == "CONTRIBUTING.md" and "file" in block.marks for block in shown)
