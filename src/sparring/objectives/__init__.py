"""The training objectives, by name. Each is a search for data and a loss on what was found."""

from sparring.objectives.ates import ATES
from sparring.objectives.base import SPECIAL, Attack, Objective, Setting
from sparring.objectives.cat import CAT
from sparring.objectives.contrib.by_definition import FAT_BY_LOSS, FAT_BY_PROBABILITY
from sparring.objectives.contrib.paced import FAT_PACED, FAT_PATIENT
from sparring.objectives.dat import DAT
from sparring.objectives.fat import FAT, FAT_FOR_MART, FAT_FOR_TRADES
from sparring.objectives.madry import MADRY
from sparring.objectives.mart import MART
from sparring.objectives.standard import STANDARD
from sparring.objectives.trades import TRADES

OBJECTIVES: dict[str, Objective] = {
    "standard": STANDARD,
    "madry": MADRY,
    "fat": FAT,
    "trades": TRADES,
    "fat-trades": FAT_FOR_TRADES,
    "mart": MART,
    "fat-mart": FAT_FOR_MART,
    "cat": CAT,
    "dat": DAT,
    "ates": ATES,
    "fat-by-loss": FAT_BY_LOSS,
    "fat-by-probability": FAT_BY_PROBABILITY,
    "fat-paced": FAT_PACED,
    "fat-patient": FAT_PATIENT,
}

__all__ = ["OBJECTIVES", "SPECIAL", "Attack", "Objective", "Setting"]
