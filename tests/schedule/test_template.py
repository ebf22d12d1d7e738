from fourfold.schedule import Part, Template


def test_gather_ahead_hides_and_the_first_gather_is_exposed():
    # two blocks: gather one ahead; each gather takes 2, each block computes 3
    parts = (
        Part("wire:z", "gather 0", 2.0, bytes=100),
        Part("compute", "block 0", 3.0, after=(0,)),
        Part("wire:z", "gather 1", 2.0, bytes=100),
        Part("compute", "block 1", 3.0, after=(2,)),
    )
    template = Template(parts)
    assert template.ends() == [2.0, 5.0, 4.0, 8.0]
    assert (template.seconds, template.exposed(), template.bytes) == (8.0, 2.0, 200)


def test_empty_template_takes_no_time():
    assert Template(()).seconds == 0 and Template(()).exposed() == 0
