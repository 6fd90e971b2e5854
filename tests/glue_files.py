"""Small files in each GLUE task's exact formats, with made-up sentences: official TSV and the hub's parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Texts with what breaks readers: unbalanced quotes, commas, a lone carriage return, Unicode line ends.
TEXTS = [
    'He said "yes',
    'no" she thought',
    "plain words, with a comma",
    '"quoted" whole',
    "a lone \r return",
    "dots \u2028 and lines",
    "naïve café",
    "N/A",
    '"""',
    "last one's here",
]
HEADERS = {
    "SST-2": "sentence\tlabel",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "QQP": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "MNLI": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "MNLI dev": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
    "QNLI": "index\tquestion\tsentence\tlabel",
    "RTE": "index\tsentence1\tsentence2\tlabel",
}
MNLI = ["neutral", "entailment", "contradiction"]
ENTAILMENT = ["not_entailment", "entailment"]


def a(i: int) -> str:
    return TEXTS[i % len(TEXTS)]


def b(i: int) -> str:
    return TEXTS[(3 * i + 1) % len(TEXTS)] + f" {i}"


def official_line(folder: str, i: int, dev: bool) -> str:
    label = str(i % 2)
    if folder == "CoLA":
        return f"gj04\t{label}\t{'*' if label == '0' else ''}\t{a(i)}"
    if folder == "SST-2":
        return f"{a(i)}\t{label}"
    if folder == "MRPC":
        return f"{label}\t{700 + i}\t{900 + i}\t{a(i)}\t{b(i)}"
    if folder == "QQP":
        return f"{i}\t{2 * i}\t{2 * i + 1}\t{a(i)}\t{b(i)}\t{label}"
    if folder == "STS-B":
        return f"{i}\tmain-captions\tMSRvid\t2012test\t{i}\tnone\tnone\t{a(i)}\t{b(i)}\t{i % 6 * 0.8:.3f}"
    if folder == "MNLI":
        labels = [MNLI[i % 3]] * (5 if dev else 1)
        parses = "\t".join(["( parse )"] * 4)
        return "\t".join([f"{i}\t{i}n\t{i}c\tfiction\t{parses}\t{a(i)}\t{b(i)}", *labels, MNLI[i % 3]])
    return f"{i}\t{a(i)}\t{b(i)}\t{ENTAILMENT[i % 2]}"


def write_official(root: Path, rows: int = 12) -> Path:
    """Every task's training and development files; development rows are the first half."""
    for folder in ("CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE"):
        (root / folder).mkdir(parents=True)
        for name in ("train", "dev_matched", "dev_mismatched") if folder == "MNLI" else ("train", "dev"):
            dev = name != "train"
            lines = [official_line(folder, i, dev) for i in range(rows // 2 if dev else rows)]
            if folder == "QQP" and not dev:  # two halves of a row that a line break cut
                lines[3:3] = ["77\t8\t9\tcut here", "and the rest\tother\t1"]
            header = HEADERS["MNLI dev" if folder == "MNLI" and dev else folder] if folder != "CoLA" else None
            ends = "\r\n" if folder == "MRPC" else "\n"
            content = ends.join([*([header] if header else []), *lines]) + ends
            (root / folder / f"{name}.tsv").write_bytes(content.encode())
    return root


def hub_row(config: str, i: int) -> dict[str, Any]:
    if config in ("cola", "sst2"):
        return {"sentence": a(i), "label": i % 2, "idx": i}
    if config == "stsb":
        return {"sentence1": a(i), "sentence2": b(i), "label": i % 6 * 0.8, "idx": i}
    if config == "mnli":
        number = ["entailment", "neutral", "contradiction"].index(MNLI[i % 3])
        return {"premise": a(i), "hypothesis": b(i), "label": number, "idx": i}
    names = {"qqp": ("question1", "question2"), "qnli": ("question", "sentence")}
    first, second = names.get(config, ("sentence1", "sentence2"))
    label = i % 2 if config in ("mrpc", "qqp") else ["entailment", "not_entailment"].index(ENTAILMENT[i % 2])
    return {first: a(i), second: b(i), "label": label, "idx": i}


def write_hub(root: Path, rows: int = 12) -> Path:
    """The same rows in the hub's layout; the training split lies in two files, and test splits have labels of -1."""
    import pyarrow
    from pyarrow import parquet

    for config in ("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte"):
        (root / config).mkdir(parents=True)
        table = [hub_row(config, i) for i in range(rows)]
        validation = ("validation_matched", "validation_mismatched") if config == "mnli" else ("validation",)
        files = {f"{split}-00000-of-00001": table[: rows // 2] for split in validation}
        files |= {"train-00000-of-00002": table[:5], "train-00001-of-00002": table[5:]}
        files["test-00000-of-00001"] = [{**row, "label": -1} for row in table]
        for name, part in files.items():
            parquet.write_table(pyarrow.Table.from_pylist(part), root / config / f"{name}.parquet")
    return root
