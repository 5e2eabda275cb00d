// SPDX-License-Identifier: MIT
#include "failover/spins.h"

#include <sched.h>
#include <unistd.h>

#include "clock.h"

#define PATIENT_NS 5000000ull	/* from then on it sleeps between its looks: others of its domain move, too */

static bool has_processors(int more_than)
{
	cpu_set_t may;

	return !sched_getaffinity(0, sizeof(may), &may) && CPU_COUNT(&may) > more_than;
}

bool mpsd_fence_spins(void)
{
	return has_processors(1);
}

/* Of two processors one is for those that are waited for, as where there is but one. */
bool mpsd_fence_spins_too(void)
{
	return has_processors(2);
}

/*
 * Who sleeps may get a processor back some ms later only: others' threads spin in the resource manager meanwhile. Where
 * there is but one, it is those that are waited for that need it.
 */
void mpsd_fence_rest(uint64_t began, bool spins)
{
	uint64_t now = mpsd_now_ns();

	if (!spins || now - began > PATIENT_NS)
		usleep(MPSD_FENCE_LOOK_NS / 1000);
	else
		while (mpsd_now_ns() - now < MPSD_FENCE_LOOK_NS)
			;
}
