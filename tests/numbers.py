"""What a program may send where a number is expected."""

WRONG_NUMBERS = (
    *(
        "",
        "-1",
        "+1",
        "1.5",
        "0x10",
        "1_000",
        "1,000",
        "nan",
        "NaN",
        "inf",
        "-inf",
        "Infinity",
        "1e999",
        "1e-999",
        "true",
        "null",
    ),
    *("%D9%A3", "%C2%B2", "%EF%BC%91", "1%00", "%001", "%201", "1%0A", "[]", "{}", "%FF", "--1", "1-"),
    *("9" * 10, "9" * 20, "9" * 400, "9" * 5000, "0" * 5000 + "1", "-" + "9" * 5000),
)
"""As they stand in an address: signs, fractions, exponents, digits of other scripts, too many digits (Python converts 4,300), none."""
