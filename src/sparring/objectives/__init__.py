"""The training objectives, by name. Each is a search for data and a loss on what was found."""

from sparring.objectives.ates import ATES
from sparring.objectives.cat import CAT
from sparring.objectives.dat import DAT
from sparring.objectives.fat import FAT, FAT_FOR_MART, FAT_FOR_TRADES
from sparring.objectives.madry import MADRY
from sparring.objectives.mart import MART
from sparring.objectives.search import Attack, Objective, Setting
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
}

__all__ = ["OBJECTIVES", "Attack", "Objective", "Setting"]
