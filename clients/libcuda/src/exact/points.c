// SPDX-License-Identifier: MIT
/* Where events are: behind which operation of which lane. */
#include <stdlib.h>

#include "exact/exposure.h"
#include "exact/state.h"

#define POINTS 1024		/* buckets */

static struct known_point {
	struct known_point *next;
	CUevent event;
	struct mpsd_point point;
	uint64_t epoch;			/* the last one with an operation that names it */
	bool is_by_graph;
} *points[POINTS];

static struct known_point **place_of(CUevent event)
{
	struct known_point **place = &points[(uintptr_t)event * 0x9e3779b97f4a7c15ull >> 54];

	while (*place && (*place)->event != event)
		place = &(*place)->next;
	return place;
}

static struct known_point *used_point(CUevent event)
{
	struct known_point **place = place_of(event);

	if (!*place)
		*place = calloc(1, sizeof(**place));
	if (*place) {
		(*place)->event = event;
		(*place)->epoch = mpsd_epoch.number;
	} else {
		__atomic_store_n(&mpsd_epoch.unsure, "out of host memory", __ATOMIC_RELAXED);
		mpsd_exposure_begin("out of host memory");
	}
	return *place;
}

void mpsd_point_set(CUevent event, struct mpsd_point point)
{
	struct known_point *known = used_point(event);

	if (!known)
		return;
	known->point = point;
	known->is_by_graph = false;
}

void mpsd_point_set_by_graph(CUevent event)
{
	struct known_point *known = used_point(event);

	if (!known)
		return;
	known->point = (struct mpsd_point){ NULL, 0 };
	known->is_by_graph = true;
}

bool mpsd_point_is_by_graph(CUevent event)
{
	const struct known_point *known = *place_of(event);

	return known && known->is_by_graph && known->epoch == mpsd_epoch.number;
}

void mpsd_point_use(CUevent event)
{
	used_point(event);
}

bool mpsd_point_is_used(CUevent event)
{
	struct known_point *known = *place_of(event);

	return known && known->epoch == mpsd_epoch.number;
}

struct mpsd_point mpsd_point_of(CUevent event)
{
	struct known_point *known = *place_of(event);

	return known ? known->point : (struct mpsd_point){ NULL, 0 };
}

void mpsd_point_forget(CUevent event)
{
	struct known_point **place = place_of(event), *known = *place;

	if (known)
		*place = known->next;
	free(known);
}

void mpsd_points_forget_lane(const struct mpsd_lane *lane)
{
	for (unsigned int i = 0; i < POINTS; i++)
		for (struct known_point *known = points[i]; known; known = known->next)
			if (known->point.lane == lane)
				known->point = (struct mpsd_point){ NULL, 0 };
}
