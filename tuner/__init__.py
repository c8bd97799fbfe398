"""Tuning engine of Steptune, which needs neither a database nor a web server."""

if __name__ == "tuner":  # a checkout's own folder answers to the old name where it is the working directory
    from steptune._old_name import get_attribute as __getattr__  # noqa: F401
    from steptune._old_name import hand_on

    is_old_name = True
    hand_on()
