"""PlanCraft: crafting plans against a recipe book, where no node sees recipes and inventory."""

from skeletons.plancraft.load import load

__all__ = ["load"]
