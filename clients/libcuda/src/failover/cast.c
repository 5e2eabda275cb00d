// SPDX-License-Identifier: MIT
#include "failover/cast.h"

#include "failover/carry.h"

static CUresult make_stream(void **native)
{
	return real_cuStreamCreate((CUstream *)native, CU_STREAM_NON_BLOCKING);
}

static CUresult make_event(void **native)
{
	return real_cuEventCreate((CUevent *)native, CU_EVENT_DISABLE_TIMING);
}

static CUresult find(struct mpsd_cast_part *part, const void *name, CUresult (*make_one)(void **native), void **native)
{
	unsigned int i = 0;
	CUresult result;

	while (i < part->count && part->names[i] != name)
		i++;
	if (i == MPSD_CAST_MOST)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (i == part->count) {
		result = make_one(&part->natives[i]);
		if (result != CUDA_SUCCESS)
			return result;
		part->names[i] = name;
		part->count++;
	}
	*native = part->natives[i];
	return CUDA_SUCCESS;
}

CUresult mpsd_cast_stream(struct mpsd_cast *cast, CUstream name, CUstream *native)
{
	return find(&cast->streams, name, make_stream, (void **)native);
}

CUresult mpsd_cast_event(struct mpsd_cast *cast, CUevent name, CUevent *native)
{
	return find(&cast->events, name, make_event, (void **)native);
}

void mpsd_cast_end(struct mpsd_cast *cast)
{
	for (unsigned int i = 0; i < cast->streams.count; i++)
		real_cuStreamDestroy_v2(cast->streams.natives[i]);
	for (unsigned int i = 0; i < cast->events.count; i++)
		real_cuEventDestroy_v2(cast->events.natives[i]);
}
