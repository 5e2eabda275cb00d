// SPDX-License-Identifier: MIT
/* What the program has set of its streams holds in the next copy too. None of it is a handle. */
#include <stdlib.h>
#include <string.h>

#include "failover/line.h"
#include "failover/made.h"

#define ATTRIBUTES 32		/* more than cuda.h has; what is none of a stream's the driver refuses to tell */

static bool is_legacy(CUstream stream)
{
	return !stream || stream == CU_STREAM_LEGACY;
}

/* Of the legacy stream there is no record: it is the context's. */
static bool find(CUstream stream, struct mpsd_made *record)
{
	bool is;

	if (is_legacy(stream))
		return real_cuCtxGetDevice(&record->device) == CUDA_SUCCESS;
	mpsd_made_lock();
	record->of = mpsd_made_find(stream);
	is = record->of && record->of->kind == MPSD_MADE_STREAM;
	if (is)
		record->device = record->of->device;
	mpsd_made_unlock();
	return is;
}

static CUresult note(CUstream stream, CUstreamAttrID attribute, const CUstreamAttrValue *value, uint64_t moves)
{
	struct mpsd_made record = { .kind = MPSD_MADE_STREAM_ATTRIBUTE, .what = (int)attribute };
	CUstreamAttrValue *kept;

	if (!find(stream, &record)) {
		if (atomic_load(&mpsd_moves) != moves)
			return MPSD_AGAIN;
		return mpsd_line_made(CUDA_SUCCESS,
				      "attributes of a stream from an untracked API call");
	}
	kept = malloc(sizeof(*kept));
	if (!kept)
		return mpsd_line_made(CUDA_SUCCESS, "out of host memory");
	memcpy(kept, value, sizeof(*kept));
	record.attribute = kept;
	if (mpsd_made_set(&record, moves))
		return CUDA_SUCCESS;
	free(kept);
	return MPSD_AGAIN;
}

CUresult make_cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *param)
{
	uint64_t moves = mpsd_tables()->moves;
	CUresult result = inner_cuStreamSetAttribute(mpsd_native(hStream), attr, param);

	return result == CUDA_SUCCESS ? note(hStream, attr, param, moves) : result;
}

struct values {
	bool is[ATTRIBUTES];
	CUstreamAttrValue value[ATTRIBUTES];
};

static void look(CUstream stream, struct values *found)
{
	memset(found, 0, sizeof(*found));
	for (int i = 1; i < ATTRIBUTES; i++)
		found->is[i] = real_cuStreamGetAttribute(mpsd_native(stream), (CUstreamAttrID)i, &found->value[i]) ==
			       CUDA_SUCCESS;
}

/* Which of them it copies is the driver's to know: those that are others than before. */
CUresult make_cuStreamCopyAttributes(CUstream dstStream, CUstream srcStream)
{
	uint64_t moves = mpsd_tables()->moves;
	struct values before, after;
	CUresult result;

	if (!mpsd_tables()->real[MPSD_cuStreamGetAttribute]) {
		mpsd_line_opaque("cuStreamCopyAttributes");
		return mpsd_answered(inner_cuStreamCopyAttributes(mpsd_native(dstStream), mpsd_native(srcStream)));
	}
	look(dstStream, &before);
	result = inner_cuStreamCopyAttributes(mpsd_native(dstStream), mpsd_native(srcStream));
	if (result == CUDA_SUCCESS)
		look(dstStream, &after);
	for (int i = 1; result == CUDA_SUCCESS && i < ATTRIBUTES; i++)
		if (after.is[i] && memcmp(&before.value[i], &after.value[i], sizeof(after.value[i])))
			result = note(dstStream, (CUstreamAttrID)i, &after.value[i], moves);
	return result;
}
