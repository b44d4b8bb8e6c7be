"""The former names of what is in `results` and `within_stratum`, for callers that have not moved."""

from nexus_ablate.comparison.results import ArmResult, Interaction, Secondary, Stratum
from nexus_ablate.comparison.within_stratum import compare_stratum

Comparison = Stratum
Row = ArmResult
Together = Interaction
compare = compare_stratum
__all__ = ["Comparison", "Row", "Secondary", "Together", "compare"]
