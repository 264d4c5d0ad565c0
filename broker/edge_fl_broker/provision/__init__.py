"""The fleet's certificate authority: enrolment, renewal and revocation."""
