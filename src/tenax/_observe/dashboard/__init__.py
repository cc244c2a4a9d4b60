"""The live page of a run: served next to the coordinator, only while it is switched on."""
