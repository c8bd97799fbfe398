"""What holds for all tests."""

from hypothesis import settings

# A busy machine makes an example slow; that is no failure.
settings.register_profile("steptune", deadline=None)
settings.load_profile("steptune")
