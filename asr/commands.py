"""What the commands share: the decoding options, and how errors end a command."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from asr.heap import importing

if TYPE_CHECKING:
    from asr.decode.recognizer import Recognizer


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Adds the corpora that a command reads."""
    forms = "manifest (.jsonl), tar, folder, cuts (.jsonl.gz), shards, ... (all forms: asr.corpus --help)"
    parser.add_argument("corpus", nargs="+", help=forms)


def add_decoding_options(parser: argparse.ArgumentParser, batch_seconds: float | None = 360.0) -> None:
    """Adds the decoding options, without --batch-seconds if `batch_seconds` is None."""
    group = parser.add_argument_group(
        "decoding", "a default with * is replaced by the value tuned for the model (asr.tune), if there is one"
    )
    group.add_argument("--model", help="model folder, or whisper:PATH (default: the model that ships)")
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    group.add_argument(
        "--precision",
        default="auto",
        help="float32, bfloat16 or int8; auto (default): whatever is fast here, int8 if tuned for it",
    )
    if batch_seconds is not None:
        at_once = f"seconds of audio decoded at once (default: {batch_seconds:g})"
        group.add_argument("--batch-seconds", type=float, default=batch_seconds, help=at_once)
    group.add_argument(
        "--piece-seconds", type=float, help="cut longer recordings at their pauses (default: 20, or as in training)"
    )
    group.add_argument(
        "--attention-window",
        type=int,
        metavar="FRAMES",
        help="encoder frames on each side that attention sees (default: all)",
    )
    group.add_argument("--lm", help="language model folder (asr.train_lm) for the search (default: the model's own)")
    group.add_argument(
        "--ngram", help="word n-gram model (ARPA or KenLM) that rescores the n-best list (default: none)"
    )
    group.add_argument("--strategy", help="beam, rescore, ctc or greedy (default: beam*)")
    group.add_argument("--beam-size", type=int, help="hypotheses kept at each step (default: 10*)")
    group.add_argument("--ctc-weight", type=float, help="share of the CTC score, 0 to 1 (default: 0.3*)")
    group.add_argument("--lm-weight", type=float, help="weight of the language model's score; 0: none (default: 0.3*)")
    group.add_argument(
        "--ilm-weight",
        type=float,
        help="weight of the transcripts' bigram to subtract where a language model is added (default: 0*)",
    )
    group.add_argument("--ngram-weight", type=float, help="weight of the n-gram model's score (default: 0.3*)")
    group.add_argument("--phrases", metavar="FILE", help="phrases to boost, one per line: names, terms")
    group.add_argument("--phrase-weight", type=float, help="bonus for each token of such a phrase (default: 1)")
    group.add_argument("--length-bonus", type=float, help="added to the score for each token (default: 0*)")


def add_nbest(parser: argparse.ArgumentParser) -> None:
    """Adds the option of commands that show more than one hypothesis."""
    help = "hypotheses of each segment that JSON shows, at most --beam-size (default: 1)"
    parser.add_argument("--nbest", type=int, metavar="N", help=help)


def load_recognizer(args: argparse.Namespace) -> Recognizer:
    """The recogniser that the options ask for. Raises ValueError naming the option or the folder that is wrong, or an
    option that would have no effect."""
    settings = {"precision": args.precision, "ngram": args.ngram}
    for name in ("piece_seconds", "batch_seconds", "channel"):  # not all commands have the last two
        if (value := getattr(args, name, None)) is not None:
            settings[name] = value
    if args.attention_window is not None:
        if args.attention_window < 1:
            raise ValueError(f"--attention-window must be at least 1, not {args.attention_window}")
        settings["attention_window"] = (args.attention_window, args.attention_window)
    if args.lm_weight == 0:
        settings["language_model"] = None
    elif args.lm:
        settings["language_model"] = args.lm
    names = ("strategy", "beam_size", "ctc_weight", "lm_weight", "ilm_weight", "ngram_weight", "length_bonus", "nbest")
    given = {name: value for name in (*names, "phrase_weight") if (value := getattr(args, name, None)) is not None}
    if args.phrases:
        from asr.audio.reading import read_lines

        given["phrases"] = tuple(line for line in read_lines(args.phrases) if line.strip())
        if not given["phrases"]:
            raise ValueError(f"--phrases {args.phrases}: there are none in it")
    recognizer = load_model(args.model, args.device, **settings, **given)
    _check_effects(args, given, recognizer)
    return recognizer


def _check_effects(args: argparse.Namespace, given: dict[str, Any], recognizer: Recognizer) -> None:
    """Raises ValueError for an option without effect on this recogniser; `given`: the fields set of `DecodeOptions`."""
    if args.piece_seconds is not None and recognizer.takes != "sound":
        raise ValueError(f"--piece-seconds is for sound, but this model takes {recognizer.takes}")
    if args.piece_seconds is not None and recognizer.window:
        raise ValueError(f"--piece-seconds: this model hears pieces of {recognizer.window:g} s")
    if args.phrase_weight is not None and not recognizer.options.phrases:
        raise ValueError(f"--phrase-weight {args.phrase_weight}: there are no --phrases")
    unasked = args.lm or args.ngram or any(map(given.get, ("lm_weight", "ilm_weight", "ngram_weight")))
    strategy, beam_size = recognizer.options.strategy, recognizer.options.beam_size
    if unasked and (strategy == "greedy" or (strategy == "ctc" and beam_size == 1)):
        alone = f"--strategy {strategy}{' with a beam of 1' if strategy == 'ctc' else ''}"
        raise ValueError(f"{alone} uses no other model: leave out --lm, --ngram and their weights")
    if strategy == "ctc" and beam_size == 1 and given.get("length_bonus"):
        raise ValueError("--strategy ctc with a beam of 1 takes the best path: leave out --length-bonus")
    if strategy == "greedy" and (given.get("beam_size", 1) > 1 or given.get("length_bonus")):
        raise ValueError("--strategy greedy has one hypothesis: leave out --beam-size and --length-bonus")
    if strategy == "greedy" and given.get("ctc_weight"):
        raise ValueError("--strategy greedy is by attention alone: leave out --ctc-weight")
    if strategy == "ctc" and (given.get("ctc_weight") is not None or given.get("ilm_weight")):
        raise ValueError("--strategy ctc does without the decoder: leave out --ctc-weight and --ilm-weight")
    for model, *weights in (("language_model", "lm_weight", "ilm_weight"), ("ngram", "ngram_weight")):
        useless = next((name for name in weights if given.get(name)), None)
        if useless and getattr(recognizer, model) is None:
            wanted = {"language_model": "language model (--lm)", "ngram": "n-gram model (--ngram)"}[model]
            raise ValueError(f"--{useless.replace('_', '-')} {given[useless]}: there is no {wanted}")
    for model, weight in (("lm", "lm_weight"), ("ngram", "ngram_weight")):
        flag, tried = weight.replace("_", "-"), getattr(args, f"{weight}s", None)  # the values that asr.tune tries
        if any(tried or [getattr(recognizer.options, weight)]):
            continue
        why = f"--{flag} is 0" if weight in given else f"{flag} is 0, as tuned for the model; give --{flag}"
        asked = {f"--{model}": getattr(args, model)}
        if model == "lm":
            asked |= {
                "--ilm-weight": given.get("ilm_weight"),
                "--ilm-weights": any(getattr(args, "ilm_weights", ()) or ()),
            }
        if useless := next((name for name, value in asked.items() if value), None):
            raise ValueError(f"{useless} would have no effect: {f'--{flag}s are 0' if tried else why}")


def load_model(model: str | None, device: str | None, **settings) -> Recognizer:
    """Calls `Recognizer.load`; raises ValueError for a --device that does not exist."""
    with importing():
        from asr.decode.device import existing_device
        from asr.decode.recognizer import Recognizer

    return Recognizer.load(model, existing_device(device, "--device"), **settings)


@contextlib.contextmanager
def progress_bar(seconds: float) -> Iterator[Callable[[float], None] | None]:
    """The function that advances a bar of seconds of audio decoded; None off a terminal or for less than a minute."""
    if seconds < 60 or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s"), TimeRemainingColumn())
    above = {"redirect_stdout": sys.stdout.isatty()}  # what is printed meanwhile; but rich would take over a file, too
    with Progress(*columns, console=Console(stderr=True, soft_wrap=True), transient=True, **above) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda done: bar.advance(task, done)


def cuts_path(text: str) -> Path:
    """The argparse type of an option that names cuts to write."""
    if not text.endswith(".jsonl.gz"):
        raise argparse.ArgumentTypeError(f"{text}: cuts are written as .jsonl.gz")
    return Path(text)


def first_repeated(names: Iterable[Hashable]) -> Hashable | None:
    """The first name that occurs more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def keep_inputs(inputs: Sequence[str | Path], *outputs: Path | None) -> None:
    """Raises ValueError if a command would overwrite one of its inputs, or write to a file twice."""
    read = {Path(path).resolve() for path in inputs}
    written: set[Path] = set()
    for output in filter(None, outputs):
        if output.resolve() in read:
            raise ValueError(f"{output} would overwrite what is read")
        if output.resolve() in written:
            raise ValueError(f"{output} would be written twice")
        written.add(output.resolve())


def check_outputs(*outputs: Path | None) -> None:
    """Makes the folders of the outputs; raises OSError, before any work, for an output that cannot be written."""
    for path in filter(None, outputs):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink(missing_ok=True)  # another process of the same command may have been faster


def check_no_model(folder: Path) -> None:
    """Raises ValueError if a command would overwrite a model, or the folder for one is a file."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file: choose a folder for the model")
    if any((folder / name).exists() for name in ("config.json", "decoding.json", "lm")):
        raise ValueError(f"{folder} already holds a model: move it away, or choose another folder")


@contextlib.contextmanager
def guarded(command: str) -> Iterator[None]:
    """Wraps a command: an error that the user can fix ends it with one line (code 2), and so do external causes (130
    for Ctrl-C, 1 if memory runs out). Closed outputs are replaced."""
    replace_closed_outputs()
    logging.basicConfig(format="%(message)s")
    try:
        yield
    except (ValueError, OSError) as error:
        fail(command, error)
    except KeyboardInterrupt:
        fail(command, "interrupted", code=130)
    except (MemoryError, RuntimeError) as error:  # what torch raises, on a GPU and on a CPU
        if isinstance(error, RuntimeError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        fail(command, "out of memory: lower --batch-seconds or --beam-size, where the command has them", code=1)


def say(text: str) -> None:
    """Prints and flushes, with JSON's escapes for characters that the terminal's encoding lacks; a closed pipe
    (`| head`) ends the command silently."""
    try:
        try:
            print(text, end="", flush=True)
        except UnicodeEncodeError:
            codecs.register_error(
                "json", lambda error: (json.dumps(error.object[error.start : error.end])[1:-1], error.end)
            )
            sys.stdout.reconfigure(errors="json")
            print(text, end="", flush=True)
    except OSError as error:
        give_up_output()
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        fail("asr", f"standard output: {error.strerror}", code=1)


def replace_closed_outputs() -> None:
    """Python has no output that is closed when it starts (`2>&-`): what is written there then goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8", errors="replace"))  # noqa: SIM115


def give_up_output() -> None:
    """Discards what is still to be printed, or Python would complain at exit about an output that failed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fail(command: str, message: object, code: int = 2) -> NoReturn:
    """Prints one line on standard error and exits: code 2 is for a user's mistake. With ASR_TRACEBACK set in the
    environment, prints the traceback, too."""
    if os.environ.get("ASR_TRACEBACK"):
        traceback.print_exc()
    print(f"{command}: {message}", file=sys.stderr)
    sys.exit(code)
