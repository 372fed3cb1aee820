"""Stable codes of the problems of a YAML file, by where they are found; `specsot explain CODE`."""

from enum import StrEnum


class ProblemCode(StrEnum):
    """What kind of problem it is. A code that was given once means the same for ever."""

    # the file
    FILE = "G001"
    ENCODING = "G002"
    SYNTAX = "G003"
    REFUSED = "G004"
    TWICE = "G005"
    TOP = "G006"
    VERSION = "G007"
    TOO_LARGE = "G008"
    # its keys and values
    UNKNOWN_KEY = "G101"
    MISSING_KEY = "G102"
    WRONG_TYPE = "G103"
    WRONG_VALUE = "G104"
    NULL = "G105"
    UNKNOWN_KIND = "G106"
    OTHER_KIND = "G107"
    STATE_NAME = "G108"
    OPTION = "G109"
    EXTENDS = "G110"
    # names
    NO_STATE = "G201"
    NO_OP = "G202"
    NO_GUARD = "G203"
    NO_VARIANT = "G204"
    NO_SETTING = "G205"
    SETTING_VALUE = "G206"
    NO_REFERENCE = "G207"
    NEEDS_SETTING = "G208"
    NEEDS_BLOCK = "G209"
    UNUSED_BLOCK = "G210"
    NO_FUNCTION = "G211"
    NO_SCHEDULE = "G212"
    # sizes
    TREE_SIZE = "G301"
    BUDGET = "G302"
    ROWS = "G303"
    BLOCK_SIZE = "G304"
    # blocks that do not go together
    BEAM_ALONE = "G401"
    BEAM_OP = "G402"
    BLEND_LAYERS = "G403"
    BLEND_RATIOS = "G404"
    BLEND_MASK = "G405"
    NO_SEARCH = "G406"
    NO_FOLD = "G407"
    RANKED_DRAWS = "G408"
    RULE = "G409"
    TWO_DRAFTERS = "G410"
    SAMPLES = "G411"
    CHOICE = "G412"
    # ways through the graph
    FINAL_LEFT = "G501"
    DEAD_END = "G502"
    NO_WAY_OUT = "G503"
    GUARDED_LAST = "G504"
    UNREACHABLE = "G505"
    NO_END = "G506"
    NEVER_TAKEN = "G507"
    # values on the way
    UNSET = "G601"
    UNREAD = "G602"
    REPEATED = "G603"
    IDLE_CYCLE = "G604"
    # what only the loaded model can tell
    NO_TOKEN = "G701"
    NO_MEMORY = "G702"
    MODEL_LAYERS = "G703"
    # prompt templates
    TEMPLATE_FILE = "G801"
    SLOTS = "G802"
    TEXTS = "G803"
    # experiments
    NO_SIDE = "G901"
    NO_FIGURE = "G902"
    NO_AXIS = "G903"
