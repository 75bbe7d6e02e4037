"""Corpora on the command line: a command of the top floor, kept next to the code it calls.

python -m asr.corpus download PART... --out DIR                      parts of LibriSpeech
python -m asr.corpus prepare CORPUS... --out cuts.jsonl.gz           checks the files, writes Lhotse cuts
python -m asr.corpus sample CUTS --utterances 100 --out some.jsonl.gz [--rest others.jsonl.gz]
python -m asr.corpus split CUTS --speakers 5 --out dev.jsonl.gz --rest train.jsonl.gz
python -m asr.corpus shard CORPUS... --out DIR                       a few large files instead of many small ones
python -m asr.corpus segment CUTS --out utterances.jsonl.gz           long recordings, cut between words
python -m asr.corpus splice CUTS --wav DIR --out spliced.jsonl.gz    new utterances from the words of CUTS
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lhotse import AudioSource, CutSet, MonoCut

from asr.audio.reading import SAMPLE_RATE, write_wav
from asr.commands import check_outputs, cuts_path, first_repeated, guarded, keep_inputs, say
from asr.corpus import segmenting, splicing
from asr.corpus.librispeech import OPENSLR, download_librispeech
from asr.corpus.opening import FORMS, open_corpus
from asr.corpus.shards import write_shards
from asr.corpus.utterances import Utterance, input_kind, iterate, make_cuts, nameable, of_file, write_cuts


def download(args: argparse.Namespace) -> None:
    for part in args.part:
        say(f"{download_librispeech(part, args.out, args.url)}\n")


def prepare(args: argparse.Namespace) -> None:
    check_outputs(args.out)
    cuts = open_corpus(args.corpus, transcribed=not args.untranscribed)
    written: list[Path] = []
    with _removed_where_it_fails(written):
        if args.wav:
            cuts = CutSet.from_cuts(_copies(cuts, args.wav, written))
        cuts = write_cuts(cuts, args.out)
    _say(cuts, args.out)


@contextmanager
def _removed_where_it_fails(written: list[Path]) -> Iterator[None]:
    """Removes what was written if the block fails, so that the same command can be repeated."""
    try:
        yield
    except BaseException:
        for path in written:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _copies(cuts: CutSet, folder: Path, written: list[Path]) -> Iterator[MonoCut]:
    cuts = nameable(cuts, str(folder))
    for cut in cuts:
        if input_kind(cut) != "sound":
            raise ValueError(f"--wav is for sound, and {cut.id} is {input_kind(cut)}")
    paths = [_wav(cut.id, folder) for cut in cuts]
    if twice := first_repeated(paths):
        raise ValueError(f"--wav {folder}: two utterances would be written to {twice}")
    there = next((path for path in paths if path.exists()), None)
    if there:
        raise ValueError(f"--wav {folder}: {there} is there already, and may belong to another corpus")
    for cut, sound in iterate(cuts):
        written.append(path := _wav(cut.id, folder))
        write_wav(path, sound)
        yield of_file(cut, AudioSource("file", [0], str(path)), len(sound))


def _wav(name: str, folder: Path) -> Path:
    """The file of an utterance, always within the folder, whatever the utterance is called."""
    inside = [part for part in name.split("/") if part not in ("", ".", "..")] or ["_"]
    return Path(folder.resolve(), *inside[:-1], f"{inside[-1]}.wav")


def sample(args: argparse.Namespace) -> None:
    if args.utterances < 1:
        raise ValueError(f"--utterances must be at least 1, not {args.utterances}")
    cuts = list(open_corpus(args.corpus))
    if args.rest and args.utterances >= len(cuts):
        raise ValueError(f"{', '.join(args.corpus)}: {len(cuts)} utterances; {args.utterances} leave no --rest")
    chosen = random.Random(args.seed).sample(cuts, min(args.utterances, len(cuts)))
    _write(CutSet.from_cuts(chosen), args.out)
    if args.rest:
        names = {cut.id for cut in chosen}
        _write(CutSet.from_cuts(cut for cut in cuts if cut.id not in names), args.rest)


def split(args: argparse.Namespace) -> None:
    if args.speakers < 1:
        raise ValueError(f"--speakers must be at least 1, not {args.speakers}")
    cuts = open_corpus(args.corpus)
    speakers = sorted({speaker for cut in cuts if (speaker := cut.supervisions[0].speaker)})
    if not speakers:
        raise ValueError(f"{', '.join(args.corpus)}: no speakers are known; sample --rest splits utterances at random")
    if len(speakers) <= args.speakers:
        raise ValueError(f"{', '.join(args.corpus)}: {len(speakers)} speakers; {args.speakers} cannot be split off")
    chosen = set(random.Random(args.seed).sample(speakers, args.speakers))
    for path, inside in ((args.out, True), (args.rest, False)):  # unknown speakers belong to the rest
        _write(CutSet.from_cuts(cut for cut in cuts if (cut.supervisions[0].speaker in chosen) == inside), path)


def splice(args: argparse.Namespace) -> None:
    if not 0 < args.share <= 1 or args.copies < 1:
        raise ValueError(
            f"--share must be above 0 and at most 1, --copies at least 1, not {args.share} and {args.copies}"
        )
    if args.wav.exists():
        raise ValueError(f"--wav {args.wav} is there already, and the sound in it may be another corpus'")
    check_outputs(args.out)
    cuts, rng = nameable(open_corpus(args.corpus), str(args.wav)), random.Random(args.seed)
    if twice := first_repeated(_wav(cut.id, args.wav) for cut in cuts):
        raise ValueError(f"--wav {args.wav}: the copies of two utterances would be called like {twice}")

    def spliced() -> Iterator[Utterance]:
        made: Counter[str] = Counter()
        for cut, text, sound in splicing.splice(cuts, args.share, rng, args.copies):
            made[cut.id] += 1
            name = f"{cut.id}-spliced{args.seed}-{made[cut.id]}"
            path = _wav(name, args.wav)
            write_wav(path, sound)
            yield Utterance(name, path, text, cut.supervisions[0].speaker, len(sound) / SAMPLE_RATE)

    with _removed_where_it_fails([args.wav]):
        cuts = write_cuts(make_cuts(spliced(), str(args.wav)), args.out)
    _say(cuts, args.out)


def segment(args: argparse.Namespace) -> None:
    if not 1 <= args.seconds < 1000:
        raise ValueError(f"--seconds must lie between 1 and 1000, not {args.seconds}")
    cuts = open_corpus(args.corpus)
    _write(CutSet.from_cuts(part for cut in cuts for part in segmenting.segment(cut, args.seconds)), args.out)


def shard(args: argparse.Namespace) -> None:
    if args.size < 1:
        raise ValueError(f"--size must be at least 1, not {args.size}")
    _say(write_shards(open_corpus(args.corpus, transcribed=not args.untranscribed), args.out, args.size), args.out)


def _write(cuts: CutSet, path: Path) -> None:
    _say(write_cuts(cuts, path), path)


def _say(cuts: CutSet, path: Path) -> None:
    say(f"{path}: {len(cuts)} utterances, {sum(cut.duration for cut in cuts) / 3600:.2f} h\n")


@guarded("asr.corpus")
def main() -> None:
    corpus, cuts, untranscribed, seed = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    corpus.add_argument("corpus", nargs="+", help="in any form that asr.corpus --help lists")
    cuts.add_argument("--out", type=cuts_path, required=True, help="cuts to write (.jsonl.gz)")
    untranscribed.add_argument("--untranscribed", action="store_true", help="accept audio without transcripts")
    seed.add_argument("--seed", type=int, default=1)
    parser = argparse.ArgumentParser(prog="asr-corpus", description=f"A corpus is {FORMS}.")
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], None], what: str, *shared: argparse.ArgumentParser):
        sub = commands.add_parser(run.__name__, help=what, parents=shared)
        sub.set_defaults(run=run)
        return sub

    sub = command(download, "fetch and unpack parts of LibriSpeech")
    sub.add_argument("part", nargs="+", help="train-clean-100, dev-clean, train-clean-5, ...")
    sub.add_argument("--out", type=Path, required=True, help="folder for LibriSpeech/PART")
    sub.add_argument("--url", default=OPENSLR, help=f"server (default: {OPENSLR})")
    sub = command(prepare, "check a corpus and write it as Lhotse cuts", corpus, cuts, untranscribed)
    sub.add_argument(
        "--wav", type=Path, help="also write the audio to this folder as wav, which is fast to read in training"
    )
    sub = command(sample, "draw some utterances", corpus, cuts, seed)
    sub.add_argument("--utterances", type=int, required=True)
    sub.add_argument(
        "--rest", type=cuts_path, help="cuts of all other utterances, as a dev set where speakers are unknown"
    )
    sub = command(split, "split some speakers off", corpus, cuts, seed)
    sub.add_argument("--speakers", type=int, required=True, help="how many to draw for --out")
    sub.add_argument("--rest", type=cuts_path, required=True, help="cuts of the remaining speakers")
    sub = command(shard, "write a corpus as shards (Lhotse Shar)", corpus, untranscribed)
    sub.add_argument("--out", type=Path, required=True, help="folder for the shards")
    sub.add_argument("--size", type=int, default=1000, help="utterances per shard (default: 1000)")
    what = "utterances of long cuts with word times (asr.align): cut in the pauses between words"
    sub = command(segment, what, corpus, cuts)
    sub.add_argument("--seconds", type=float, default=15.0, help="longest utterance (default: 15)")
    what = "new utterances of cuts with word times (asr.align): words replaced by others of the same speaker"
    sub = command(splice, what, corpus, cuts, seed)
    sub.add_argument("--wav", type=Path, required=True, help="folder for the audio")
    sub.add_argument("--share", type=float, default=0.5, help="share of the words to replace (default: 0.5)")
    sub.add_argument(
        "--copies", type=int, default=1, help="copies of each utterance, each with other words (default: 1)"
    )
    args = parser.parse_args()
    keep_inputs(getattr(args, "corpus", []), args.out, getattr(args, "rest", None))
    args.run(args)


if __name__ == "__main__":
    main()
