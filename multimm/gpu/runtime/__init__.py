"""From kernel text to a launch: compile, keep, launch, remember; the same for every kernel."""
