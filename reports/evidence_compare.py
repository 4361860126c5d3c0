"""Two evidence folders of one name side by side: what each measured of the same case and arm. No verdict."""
from __future__ import annotations

from harness.evidence_folder import EvidenceFolder
from harness.record import Record
from harness.verdicts import Verdict
from reports.evidence_naming import naming
from reports.evidence_numbers import filled_table, ms, ratio, times

NO_VERDICT = ("Times of different runs are no verdict: clocks, neighbours and memory differ from day to day by more than most changes, and "
              "from machine to machine by more still. Which of two is faster is told by `threearm gate`.")
FACTS = ("gpu", "driver", "power limit", "cuda", "torch", "threearm")


def side_by_side(here: EvidenceFolder, there: EvidenceFolder) -> str:
    """A table a part: verdicts and medians of both, and the ratio there / here. There is what `--compare` names."""
    parts = [_part(name, here, there) for name in here.runs if name in there.runs]
    alone = [f"{name}: only {where}" for mine, other, where in ((here, there, "here"), (there, here, "there"))
             for name in mine.runs if name not in other.runs]
    cut = [f"What is {where} has not finished, or was cut short." for folder, where in ((here, "here"), (there, "there"))
           if not folder.info.finished]
    told = "  \n".join([_differences(here, there), *cut, *alone, NO_VERDICT])
    return "\n\n".join([f"#### Beside {there.path.name} (there)", *filter(None, parts), told])


def _part(name: str, here: EvidenceFolder, there: EvidenceFolder) -> str:
    mine, theirs = ({(record.case, record.arm): record for record in folder.runs[name].records} for folder in (here, there))
    keys = list(dict.fromkeys([*mine, *theirs]))
    names = naming([here, there], (case for case, _ in keys))
    rows = [[names.own[key[0]], key[1], _cell(mine.get(key)), _cell(theirs.get(key)), _ratio(theirs.get(key), mine.get(key)),
             _outputs(mine.get(key), theirs.get(key))] for key in keys]
    head = ["case", "arm", "here, ms", "there, ms", "there / here", "outputs"]
    return f"##### {here.info.part(name).title}\n\n{filled_table(head, rows)}\n\n{names.line()}" if rows else ""


def _cell(record: Record | None) -> str:
    if record is None:
        return "not there"
    text = ms(record.time.us) if record.time else ""
    return text if record.time and record.verdict is Verdict.PASSED else f"{record.verdict.value} {text}".strip()


def _ratio(above: Record | None, below: Record | None) -> str:
    """Nothing under different contracts: those are times of different things."""
    if above and below and above.time and below.time and above.time.contract != below.time.contract:
        return f"{above.time.contract} / {below.time.contract}: not comparable"
    return times(ratio(above, below))


def _outputs(mine: Record | None, theirs: Record | None) -> str:
    """Whether both gave the same bits, from the same inputs."""
    if not mine or not theirs or not mine.outputs or not theirs.outputs:
        return ""
    if mine.inputs != theirs.inputs:
        return "other inputs"
    other = [name for name, digest in mine.outputs.items() if theirs.outputs.get(name) != digest]
    return f"{', '.join(other)} differ" if other else "bitwise same"


def _differences(here: EvidenceFolder, there: EvidenceFolder) -> str:
    """The machines, where they differ."""
    versions = [{**folder.info.machine, **{k["name"]: str(k.get("version", "")) for k in folder.info.kernels}} for folder in (here, there)]
    keys = [key for key in dict.fromkeys([*FACTS, *(k["name"] for k in here.info.kernels)])
            if versions[0].get(key) != versions[1].get(key)]
    told = "; ".join(f"{key} {versions[0].get(key) or 'none'} here, {versions[1].get(key) or 'none'} there" for key in keys)
    differing = f"Differing: {told}." if told else "Machine and versions are the same."
    return f"Here {here.info.started}, there {there.info.started}. {differing}"
