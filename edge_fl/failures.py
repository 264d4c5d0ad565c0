"""The failure words: one per way in which a device's work, a message or a report fails, with its meaning and remedy.

This is the only list of them: a device decides by it what it tries again, a server which rejections count towards quarantine, and command
line, dashboard, alerts and docs/failure-words.md show its texts. On the wire and on disk a failure word is plain text, which may be one of
another version: `Failure.of` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


@dataclass(frozen=True)
class Stated:
    """A device states the word about `subject`. final: it does not try that again on its own. calm: it is no fault, and no alert."""

    subject: str
    meaning: str
    remedy: str = ""
    final: bool = False
    calm: bool = False


@dataclass(frozen=True)
class Rejection:
    """A server rejects a message of a device with the word. counts: towards the device's quarantine."""

    meaning: str
    counts: bool = True


def states(
    word: str,
    subject: str,
    meaning: str,
    remedy: str = "",
    *,
    final: bool = False,
    calm: bool = False,
    rejection: Rejection | None = None,
) -> tuple[str, Stated, Rejection | None]:
    """A word that a device states; `rejection`: what a server means by it."""
    return word, Stated(subject, meaning, remedy, final, calm), rejection


class Failure(StrEnum):
    """A failure word. `stated` and `rejection` say what it means from a device and from a server; None: that one never uses it."""

    stated: Stated | None
    rejection: Rejection | None

    def __new__(cls, word: str, *uses: Stated | Rejection | None) -> Self:
        """Make the member of `word`."""
        self = str.__new__(cls, word)
        self._value_ = word
        self.stated = next((use for use in uses if isinstance(use, Stated)), None)
        self.rejection = next((use for use in uses if isinstance(use, Rejection)), None)
        return self

    CHUNK_HASH = states("chunk_hash", "download", "what arrived is not what was signed")
    DEADLINE = states(
        "deadline", "download", "it took longer than allowed, or a report was not acknowledged in time"
    )
    MISSING = states(
        "missing",
        "download",
        "the release or its signed metadata are not on the broker, or not signed any longer",
        "start the server, which publishes them again",
    )
    INCOMPLETE = states(
        "incomplete", "download", "parts of a release or of an agent's environment are missing"
    )
    BLOB_HASH = states(
        "blob_hash",
        "download",
        "the pieces of a message do not give the whole that was announced",
        rejection=Rejection("its update arrived damaged"),
    )
    ENOSPC = states(
        "enospc", "disk", "the card is full", "free some space; the previous release continues to serve"
    )
    DISK = states(
        "disk",
        "disk",
        "the card cannot be read or written",
        "replace it; the previous release continues to serve",
    )

    ROLLBACK = states(
        "rollback",
        "signed metadata",
        "an older version than the trusted one",
        "if the server was restored from a backup, run 'edge-fl release keys rotate timestamp' and '... rotate snapshot' there;"
        " otherwise distrust the broker",
    )
    EXPIRED = states(
        "expired",
        "signed metadata",
        "metadata or a message are too old",
        "start the server, which signs new ones; if it runs, distrust the broker: newer ones are being withheld",
    )
    WRONG_KEY = states(
        "wrong_key",
        "signed metadata",
        "metadata or a message are signed by none of the fleet's keys",
        "if the fleet has a new server, run 'sudo edge-fl device reset --trust' on the device, which keeps heads and labels;"
        " otherwise distrust the broker",
    )
    MIX_AND_MATCH = states(
        "mix_and_match", "signed metadata", "a file is not the one that the other metadata name"
    )
    TRUNCATED = states("truncated", "signed metadata", "a file ends early, or is none")
    ENDLESS = states("endless", "signed metadata", "a file is longer than allowed")
    INVALID = states("invalid", "signed metadata", "a file violates the rules of signed metadata")
    NO_ROOT = states(
        "no_root",
        "signed metadata",
        "the device trusts no keys, because none were shipped, and trust on first use is not allowed",
        "give it the fleet's keys with --root",
    )
    MANIFEST = states(
        "manifest",
        "signed metadata",
        "the description of a release is invalid, or one of its parts does not fit it",
    )

    FORGED = states(
        "forged",
        "message",
        "it was changed after it was signed, or a key, signature or share of a sum is not its sender's",
        "distrust the broker",
        rejection=Rejection("a message in its name is not signed by it", counts=False),
    )
    UNSIGNED = states(
        "unsigned",
        "message",
        "it has no signature, although signed ones came before",
        "distrust the broker, unless an older server, or one with another --home, is online",
        rejection=Rejection("a message in its name lacks its signature", counts=False),
    )
    REPLAYED = states(
        "replayed",
        "message",
        "it was signed before another one that the device has",
        "distrust the broker",
        rejection=Rejection("an old message of it was sent again", counts=False),
    )
    MISDIRECTED = states(
        "misdirected", "message", "it was signed for another device or fleet", "distrust the broker"
    )

    CANARY_FAILED = states(
        "canary_failed",
        "release",
        "the new release does not compute the expected features on this board, or the new agent fails a test of the running one",
        "the old one continues to serve",
        final=True,
    )
    UNSUPPORTED_OPSET = states(
        "unsupported_opset", "release", "onnxruntime is too old for the export", "update it", final=True
    )
    WORSE = states(
        "worse",
        "release",
        "the new model is worse on held-out samples",
        "the old one continues to serve",
        final=True,
    )
    CRASH_LOOP = states(
        "crash_loop",
        "release",
        "the agent ended early three times in a row with it",
        "the one before serves again",
    )
    BLOCKED = states(
        "blocked", "release", "it failed here before", "the device waits for a newer one", final=True
    )
    REJECTED = states(
        "rejected", "release", "it requests something that may not leave the device", final=True
    )
    ARTEFACT = states("artefact", "release", "one of its files cannot be used")
    NO_EXTRACTOR = states("no_extractor", "release", "the method of this run releases no extractor")

    NO_DATA = states(
        "no_data",
        "computation",
        "fewer than two usable samples, none of the release's classes, or samples of another kind than the release takes",
        "put files of that kind into one folder per class, named exactly as the class",
        final=True,
    )
    NO_LABELS = states(
        "no_labels",
        "computation",
        "no labelled samples yet, or only one, and the release has no fleet's head: nothing is served",
        "label some, on the label page or in one folder per class",
        final=True,
        calm=True,
    )
    OUT_OF_MEMORY = states(
        "out_of_memory",
        "computation",
        "counting or reading the samples ran out of memory",
        "use fewer or smaller files, or set keep",
    )
    KILLED = states(
        "killed",
        "computation",
        "a child process was ended by a signal",
        "it is tried again a few times, then with new samples, another release or after a restart. SIGILL is an instruction that"
        " the processor lacks, SIGSEGV or SIGBUS mostly bad memory or a bad card; edge-fl device doctor names the package",
    )
    BUDGET_EXHAUSTED = states(
        "budget_exhausted",
        "computation",
        "its next update would exceed its privacy budget",
        "it no longer trains",
        final=True,
    )
    DIVERGED = states("diverged", "computation", "training gave NaN or infinity", final=True)
    BAD_SPEC = states(
        "bad_spec",
        "computation",
        "this version cannot build the method that was requested",
        "update the agent, or install the package of a method or model of your own",
    )
    UNSUPPORTED_TIER = states(
        "unsupported_tier", "computation", "it does not belong to the tier of this device", final=True
    )
    ERROR = states("error", "computation", "an unexpected error", "the log of the device has the traceback")
    DRIFT = states(
        "drift",
        "computation",
        "the samples differ from those that the head was fitted on",
        "label some of the new ones",
    )
    PROMISE_BROKEN = states(
        "promise_broken",
        "computation",
        "its prediction sets miss the right class more often than promised",
        "label some new samples",
    )
    UNSUPPORTED_PROTO = states(
        "unsupported_proto",
        "computation",
        "the server speaks another major version of the protocol",
        "update the older of both",
    )

    WRONG_PLATFORM = states(
        "wrong_platform", "agent update", "no wheel of edge-fl for this machine and Python", final=True
    )
    UNSATISFIED = states(
        "unsatisfied",
        "agent update",
        "a package would lack a dependency, or another installed one would no longer fit; named with both versions",
        final=True,
    )
    DOWNGRADE = states(
        "downgrade",
        "agent update",
        "a lower version than the running one, not signed as a downgrade",
        final=True,
    )
    BAD_WHEEL = states(
        "bad_wheel", "agent update", "not a wheel, or it unpacks to more than was signed", final=True
    )
    WITHDRAWN = states(
        "withdrawn", "agent update", "the roll-out was aborted since: the request is old", final=True
    )
    NOT_CONNECTED = states(
        "not_connected",
        "agent update",
        "the new agent did not connect and serve within its trial",
        final=True,
    )

    SHUT_DOWN = states(
        "shut_down",
        "agent",
        "it was stopped, or starts again for an update or for other settings",
        calm=True,
    )

    TOO_FEW = states("too_few", "secure sum", "too few devices remained")
    OUT_OF_ORDER = states("out_of_order", "secure sum", "a stage that is not the next")
    INCONSISTENT = states("inconsistent", "secure sum", "shares or survivors are not those of the cohort")
    WRONG_LENGTH = states("wrong_length", "secure sum", "a vector or a share has another length")
    OUT_OF_RANGE = states("out_of_range", "secure sum", "a number is not finite, or too large for the sum")
    NOT_MASKED = states(
        "not_masked",
        "secure sum",
        "a plain sum was requested, and this device takes part in masked ones only",
    )
    NO_CERTIFICATE = states(
        "no_certificate", "secure sum", "a masked sum needs certificates", "enrol the devices"
    )
    BELOW_FLOOR = states(
        "below_floor",
        "secure sum",
        "its terms protect less than the device's owner demands",
        "raise the recipe's minimum, or lower the device's [sums]",
    )
    RESTORED = states(
        "restored",
        "secure sum",
        "the device has sent more than its folder knows, which came from a backup",
        "it takes part again with new samples",
    )
    NOTHING = states("nothing", "secure sum", "it has nothing to add")
    LOST = states("lost", "secure sum", "its connection broke")

    OFF = states(
        "off", "query or setting", "its owner has switched off the setting remote_logs, or it is simulated"
    )
    LOCAL_ONLY = states("local_only", "query or setting", "switched off by the owner")
    FIXED = states("fixed", "query or setting", "a simulated device has fixed settings")
    TOO_OFTEN = states(
        "too_often", "query or setting", "it answers at most 6 queries per minute", "try again in a minute"
    )
    BUSY = states("busy", "query or setting", "it is still answering another query", "try again")
    BUDGET = states("budget", "query or setting", "its daily budget is used up", "try again tomorrow")

    UNKNOWN = states("unknown", "certificate request", "its sender has no valid claim or certificate")
    WRONG_TOKEN = states("wrong_token", "certificate request", "the secret is not that of the claim")
    WRONG_NAME = states("wrong_name", "certificate request", "it names another device")
    USED = states("used", "certificate request", "the claim was redeemed with another key")
    TOO_MANY = states("too_many", "certificate request", "the device has too many valid certificates")
    WRONG_ROLE = states("wrong_role", "certificate request", "only devices may renew")

    STALE_ROUND = "stale_round", Rejection("its report came too late", counts=False)
    NOT_IN_COHORT = "not_in_cohort", Rejection("it was not selected in that round", counts=False)
    UNKNOWN_RELEASE = (
        "unknown_release",
        Rejection("it reports on a release that is no longer kept", counts=False),
    )
    EXTRACTOR = "extractor", Rejection("its head is fitted on another extractor", counts=False)
    NOT_ASSIGNED = "not_assigned", Rejection("it reports on a release that it was not assigned")
    WRONG_KIND = "wrong_kind", Rejection("its report is not what was requested")
    SAMPLES = "samples", Rejection("its report states an impossible number of samples")
    METRICS = "metrics", Rejection("its report states impossible numbers")
    TOO_LARGE = "too_large", Rejection("its update is larger than allowed")
    NO_PARTS = "no_parts", Rejection("its report lacks the requested update")
    COMPRESSION = "compression", Rejection("its update is compressed in another way than requested")
    PRIVACY = "privacy", Rejection("its update lacks the requested noise")
    PARTS = "parts", Rejection("its update does not contain the expected tensors")
    TENSORS = "tensors", Rejection("its update cannot be read, or contains NaN")
    NORM = "norm", Rejection("its update is much larger than allowed")
    BUFFERS = "buffers", Rejection("its update contains impossible batch statistics")
    OUTLIER = "outlier", Rejection("its update differs too much from those of the other devices")
    STATISTICS = "statistics", Rejection("its class statistics are of no possible samples")
    FLOODING = "flooding", Rejection("it sends more messages than the rate limit allows")
    MALFORMED = "malformed", Rejection("its message cannot be read", counts=False)
    OUTDATED = (
        "outdated",
        Rejection("an older message of it, which a restored broker delivered", counts=False),
    )

    @classmethod
    def of(cls, word: str) -> Failure | None:
        """The failure word of a text; None for another text, such as a word of a later version."""
        return cls._value2member_map_.get(word)  # type: ignore[return-value]

    @property
    def final(self) -> bool:
        """Whether a device does not try again on its own."""
        return self.stated is not None and self.stated.final

    @property
    def calm(self) -> bool:
        """Whether it is no fault of a device, which is not in alert then."""
        return self.stated is not None and self.stated.calm

    @property
    def explanation(self) -> str:
        """What a device means by the word, and the remedy."""
        return ": ".join(filter(None, (self.stated.meaning, self.stated.remedy))) if self.stated else ""


UNLABELLED = frozenset({Failure.NO_DATA, Failure.NO_LABELS})
"""What a device reports that has nothing to fit a head on: it says nothing about the release."""
SIGNATURE = (Failure.FORGED, Failure.UNSIGNED, Failure.REPLAYED)
"""Rejections of messages that somebody else may have sent in the name of a device."""
