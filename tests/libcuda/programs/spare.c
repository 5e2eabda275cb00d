// SPDX-License-Identifier: MIT
/* All spare names, and then those that were given back. Prints "ok". */
#include "failover/spare.h"

#include <stdio.h>

#include "checking.h"

#define ALL (1 << 16)

int main(void)
{
	static const char *taken[ALL];

	for (int i = 0; i < ALL; i++) {
		taken[i] = mpsd_spare_take();
		CHECK(mpsd_spare_is(taken[i]));
		CHECK(!i || taken[i] != taken[i - 1]);
	}
	CHECK(!mpsd_spare_take());
	mpsd_spare_give("somebody's");
	CHECK(!mpsd_spare_take());
	/* The one that was given back first comes first. */
	for (int i = 0; i < ALL; i++)
		mpsd_spare_give(taken[i]);
	for (int i = 0; i < ALL; i++)
		CHECK(mpsd_spare_take() == taken[i]);
	CHECK(!mpsd_spare_take());
	puts("ok");
	return 0;
}
