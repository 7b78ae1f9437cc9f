"""Web text against other libraries on the same texts: near-duplicates, rules of quality; growth and memory.

    python benchmarks/web_text.py --mb 4 --rules 2000 --growth-mb 50 200 --documents 25000000

`--mb` compares signatures and candidates of near-duplicates. Its texts are random lines of the machine's Python
sources, about 5 kB each, and edited copies of a tenth. All ways compare character 5-grams with 12 bands of 10 values,
except LSH's, which has 10 of 10 as in the old recipe. "LSH's way" is the loop of mattilyra/LSH (a MurmurHash3 of every
5-gram for every seed) written again in C, because that package is not on PyPI. datatrove's hash is given the same
5-grams and, as it is used, 5-grams of words: a fifth of the shingles. The words are those between spaces, which cost
far less than those of spaCy, its tokenizer.

`--rules` compares Gopher's and C4's rules with datatrove's, with spaCy (not in requirements/), on Python's reference.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import zstandard

from tools.web_text.document_index import DocumentIndex
from tools.web_text.near_duplicates import FindCandidates, write_firsts
from tools.web_text.signatures import Bands, band_hashes, bands_for

ROOT = Path(__file__).resolve().parents[1]
BATCH = 200
BANDS = bands_for(0.9)
LOOP = r"""
#include <stdint.h>
#include <string.h>
static uint64_t mix(uint64_t k) {
    k ^= k >> 33; k *= 0xff51afd7ed558ccdULL; k ^= k >> 33; k *= 0xc4ceb9fe1a85ec53ULL; return k ^ (k >> 33);
}
/* The first half of MurmurHash3_x64_128 of five bytes. */
static int64_t hash5(const unsigned char *s, uint32_t seed) {
    uint64_t k = 0, h1 = seed, h2 = seed;
    memcpy(&k, s, 5);
    k *= 0x87c37b91114253d5ULL; k = (k << 31) | (k >> 33); k *= 0x4cf5ad432745937fULL; h1 ^= k;
    h1 ^= 5; h2 ^= 5; h1 += h2; h2 += h1; h1 = mix(h1); h2 = mix(h2);
    return (int64_t)(h1 + h2);
}
void minhash(const unsigned char *text, long length, const uint32_t *seeds, long count, int64_t *out) {
    for (long s = 0; s < count; s++) {
        int64_t least = INT64_MAX;
        for (long i = 0; i + 5 <= length; i++) {
            int64_t h = hash5(text + i, seeds[s]);
            if (h < least) least = h;
        }
        out[s] = least;
    }
}
"""
Pairs = set[tuple[int, int]]


def texts(count: int, seed: int) -> Iterator[str]:
    """Yield texts, a tenth of them edited copies of the one before."""
    rng, lines = random.Random(seed), list[str]()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:600]:
        lines += path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
    lines = [line for line in lines if 20 < len(line) < 200]
    text = ""
    for number in range(count):
        if number % 10 == 9:
            words = text.split(" ")
            for _ in range(rng.randrange(12)):
                words[rng.randrange(len(words))] = rng.choice(["alder", "birch", "cherry"])
            text = " ".join(words)
        else:
            text = "".join(rng.choices(lines, k=110))
        yield text


def pairs_of(keys: np.ndarray) -> Pairs:
    """Return the pairs of documents that share a key in any column [documents, bands]."""
    found: Pairs = set()
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        same = np.flatnonzero(column[order][1:] == column[order][:-1])
        found.update(zip(order[same].tolist(), order[same + 1].tolist(), strict=True))
    return found


def ours(documents: list[str]) -> Pairs:
    batches = (documents[start : start + BATCH] for start in range(0, len(documents), BATCH))
    return pairs_of(np.concatenate([band_hashes(batch, BANDS, 1) for batch in batches]))


def grams(text: str) -> set[bytes]:
    return {text[place : place + 5].encode() for place in range(len(text) - 4)}


def datasketch(documents: list[str]) -> Pairs:
    import xxhash
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(num_perm=BANDS.count * BANDS.rows, params=(BANDS.count, BANDS.rows))
    signatures = []
    for number, text in enumerate(documents):
        signature = MinHash(num_perm=BANDS.count * BANDS.rows, hashfunc=xxhash.xxh32_intdigest)
        signature.update_batch(list(grams(text)))
        lsh.insert(number, signature, check_duplication=False)
        signatures.append(signature)
    return {
        (min(number, other), max(number, other))
        for number, signature in enumerate(signatures)
        for other in lsh.query(signature)
        if other != number
    }


def word_grams(text: str) -> set[bytes]:
    words = text.split()
    return {" ".join(words[place : place + 5]).encode() for place in range(len(words) - 4)}


def datatrove(documents: list[str], shingles: Callable[[str], set[bytes]] = grams) -> Pairs:
    from datatrove.pipeline.dedup import minhash

    class Step(minhash.MinhashDedupSignature):
        def get_shingles(self, text: str) -> np.ndarray:
            hashes = [self._hash_func(gram) for gram in shingles(text)]
            return np.array(hashes, dtype=np.uint64).reshape(-1, 1)

    minhash.load_word_tokenizer = lambda language: None
    config = minhash.MinhashConfig(num_buckets=BANDS.count, hashes_per_bucket=BANDS.rows)
    with tempfile.TemporaryDirectory() as folder:
        step = Step(folder, config)
        values = [step.get_signature(step.get_shingles(text)) for text in documents]
    return pairs_of(np.array([[hash(tuple(bucket)) for bucket in buckets] for buckets in values], dtype=np.int64))


def lsh_way(documents: list[str]) -> Pairs:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "loop.c", Path(folder) / "loop.so"
        source.write_text(LOOP)
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        loop = ctypes.CDLL(str(library)).minhash
    seeds = np.random.RandomState(0).randint(0, 10**6, 100).astype(np.uint32)
    buckets: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(10)]
    out = np.empty(100, np.int64)
    for number, text in enumerate(documents):
        data = text.encode()
        loop(data, ctypes.c_long(len(data)), ctypes.c_void_p(seeds.ctypes.data), ctypes.c_long(100),
             ctypes.c_void_p(out.ctypes.data))  # fmt: skip
        for band, values in enumerate(np.array_split(out, 10)):
            buckets[band][hash(tuple(values))].append(number)
    return {pair for band in buckets for found in band.values() for pair in itertools.pairwise(found)}


WAYS: dict[str, Callable[[list[str]], Pairs]] = {
    "ours": ours,
    "datasketch, update_batch": datasketch,
    "datatrove's MinHash": datatrove,
    "datatrove's, of words": partial(datatrove, shingles=word_grams),
    "LSH's way": lsh_way,
}


def compare(megabytes: float, rounds: int) -> dict[str, float]:
    """Print and return MB of text per CPU second of each way, the best of some rounds."""
    documents = list(texts(int(megabytes * 200), seed=1))
    size = sum(len(text.encode()) for text in documents) / 1e6
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in WAYS.items():
            started = time.process_time()
            found = way(documents)
            rate = size / (time.process_time() - started)
            best[name] = max(best.get(name, 0), rate)
            planted = sum((n - 1, n) in found for n in range(9, len(documents), 10))
            print(f"{name:26} {rate:8.2f} MB/CPU s, {planted} of {len(documents) // 10} copies are candidates")
    for name, rate in best.items():
        print(f"{name:26} {rate:8.2f} MB/CPU s, ours is {best['ours'] / rate:6.1f} times as fast")
    return best


def prose(count: int, seed: int) -> list[str]:
    """Return documents of one to eight sections of Python's reference, a tenth with a paragraph repeated."""
    from pydoc_data.topics import topics

    rng = random.Random(seed)
    sections = [section for topic in sorted(topics) for section in topics[topic].split("\n\n")]
    documents = []
    for number in range(count):
        start = rng.randrange(len(sections))
        chosen = sections[start : start + rng.randrange(1, 9)]
        if number % 10 == 9:
            chosen += rng.choices(chosen, k=len(chosen))
        documents.append("\n\n".join(chosen))
    return documents


def rules() -> dict[str, tuple[Callable[[str], str | None], Callable[[str], str | None]]]:
    """Return the rules that datatrove has, too: name -> ours and datatrove's, from a text to the text kept, or None."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter, GopherRepetitionFilter

    from tools.web_text.rules import c4_lines, gopher_quality, gopher_repetition

    def of_ours(rule: Callable[[str], str | None]) -> Callable[[str], str | None]:
        return lambda text: text if rule(text) is None else None

    def our_c4(text: str) -> str | None:
        new, reason = c4_lines(text)
        return new if reason is None else None

    def of_datatrove(block: object) -> Callable[[str], str | None]:
        def apply(text: str) -> str | None:
            document = Document(text=text, id="")
            return document.text if block.filter(document) is True else None

        return apply

    c4 = C4QualityFilter(min_num_sentences=3, min_words_per_line=5, max_word_length=-1)  # the limits of our rule
    return {
        "Gopher's quality": (of_ours(gopher_quality), of_datatrove(GopherQualityFilter())),
        "Gopher's repetition": (of_ours(gopher_repetition), of_datatrove(GopherRepetitionFilter())),
        "C4": (our_c4, of_datatrove(c4)),
    }


def compare_rules(count: int) -> dict[str, dict[str, float]]:
    """Print and return for each rule the rates of both sides, and how often they keep the same text."""
    documents = prose(count, seed=3)
    size = sum(len(text.encode()) for text in documents) / 1e6
    rows = {}
    for name, sides in rules().items():
        rates, kept = [], []
        for side in sides:
            side(documents[0])  # spaCy is loaded
            started = time.process_time()
            kept.append([side(text) for text in documents])
            rates.append(size / (time.process_time() - started))
        pairs = list(zip(*kept, strict=True))
        rows[name] = {
            "ours_mb_per_cpu_second": round(rates[0], 2),
            "datatrove_mb_per_cpu_second": round(rates[1], 2),
            "documents": count,
            "equal": sum(a == b for a, b in pairs),
            "only_ours_keeps": sum(b is None and a is not None for a, b in pairs),
            "only_datatrove_keeps": sum(a is None and b is not None for a, b in pairs),
        }
        print(name, rows[name])
    return rows


def growth(megabytes: list[float], folder: Path) -> list[dict[str, float]]:
    """Run the whole step at several sizes; print and return CPU seconds and peak memory of the command."""
    rows = []
    for size in megabytes:
        source, output = folder / f"{size}.jsonl.zst", folder / f"{size}.out.jsonl.zst"
        written = 0
        with open(source, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as stream:
            for text in texts(int(size * 200), seed=2):
                written += stream.write(json.dumps({"text": text}).encode() + b"\n")
        command = [sys.executable, ROOT / "tools" / "web_text.py", "dedup", "--input", source, "--output", output]
        process = subprocess.Popen([*map(str, command), "--memory-mb", "64"], stdout=subprocess.PIPE, text=True)
        _, _, usage = os.wait4(process.pid, 0)
        seconds = usage.ru_utime + usage.ru_stime
        row = {"text_mb": round(written / 1e6, 1), "cpu_seconds": round(seconds, 2)}
        row |= {"mb_per_cpu_second": round(written / 1e6 / seconds, 2), "peak_mib": round(usage.ru_maxrss / 1024)}
        assert process.stdout is not None
        print(row, process.stdout.readline().strip())
        rows.append(row)
    return rows


def many_documents(count: int, folder: Path) -> dict[str, float]:
    """Find candidates in random columns of so many documents; print and return the time and memory of one process."""
    index = DocumentIndex(folder / "index", (), Bands(1, 10), 1 << 26)
    index.directory.mkdir()
    rng = np.random.default_rng(0)
    for name in index.names:
        with open(index.directory / name, "wb") as file:
            for start in range(0, count, 1 << 20):
                rows = min(1 << 20, count - start)
                wide = name not in ("characters", "bytes")
                data = rng.integers(0, 1 << 64, rows, dtype=np.uint64) if wide else np.full(rows, 4000, np.uint32)
                if wide:
                    data[::10] = data[1::10][: len(data[::10])]
                file.write(data.tobytes())
    started = time.process_time()
    write_firsts(index, folder / "firsts", 1024)
    FindCandidates(index, folder / "firsts", 1024)(0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"documents": count, "cpu_seconds": round(time.process_time() - started, 1), "peak_mib": round(peak)}
    print(row)
    return row


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, help="text for the comparison")
    parser.add_argument("--rules", type=int, metavar="N", help="documents for Gopher's and C4's rules; needs spacy")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--growth-mb", type=float, nargs="*", default=[], help="sizes for the whole step")
    parser.add_argument("--documents", type=int, help="rows for exact duplicates and one band, 1024 MiB allowed")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        if args.mb:
            compare(args.mb, args.rounds)
        if args.rules:
            compare_rules(args.rules)
        growth(args.growth_mb, folder)
        if args.documents:
            many_documents(args.documents, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
