// SPDX-License-Identifier: MIT
#include "failover/wish.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "failover/line.h"
#include "failoverwire.h"
#include "proxy.h"

static struct mpsd_wish wish = { .mode = MPSD_FAILOVER_EXACT };

static void read_environment(void)
{
	const char *where = secure_getenv("MPSD_FAILOVER_SOCKET"), *mode = secure_getenv("MPSD_FAILOVER");
	const char *mirror = secure_getenv("MPSD_FAILOVER_MIRROR");

	if (mode && !strcmp(mode, "off"))
		return;
	if (where && strlen(where) < sizeof(wish.path))
		strcpy(wish.path, where);
	if (mode && !strcmp(mode, "keep"))
		wish.mode = MPSD_FAILOVER_KEEP;
	else if (mode && strcmp(mode, "exact"))
		mpsd_say("MPSD_FAILOVER: not one of off, keep, exact; exact is taken");
	if (mirror && !strcmp(mirror, "lazy"))
		wish.mirror = MPSD_WISH_LAZY;
	else if (mirror && !strcmp(mirror, "eager"))
		wish.mirror = MPSD_WISH_EAGER;
	else if (mirror)
		mpsd_say("MPSD_FAILOVER_MIRROR: not one of eager, lazy; the daemon's choice is taken");
}

const struct mpsd_wish *mpsd_wish(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_environment);
	return &wish;
}

bool mpsd_line_offered(void)
{
	return *mpsd_wish()->path;
}
