// SPDX-License-Identifier: MIT
/* Takes all reserved virtual handles of spare.c, then those that were returned. Prints "ok". */
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
	/* Returned handles are reused in the order of their return. */
	for (int i = 0; i < ALL; i++)
		mpsd_spare_give(taken[i]);
	for (int i = 0; i < ALL; i++)
		CHECK(mpsd_spare_take() == taken[i]);
	CHECK(!mpsd_spare_take());
	puts("ok");
	return 0;
}
