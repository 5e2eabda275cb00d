// SPDX-License-Identifier: MIT
#include "failover/cast.h"

#include "exact/state.h"
#include "failover/graph.h"
#include "failover/nodes.h"

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

CUresult mpsd_cast_joined(const struct mpsd_op *op, CUstream stream)
{
	return op->kind == MPSD_OP_WAIT ? CUDA_SUCCESS : mpsd_capture_joined(stream);
}

bool mpsd_cast_is_gone(const void *name)
{
	bool is = !mpsd_made_look(name) && !mpsd_made_is_word(name);

	mpsd_made_looked();
	return is;
}

CUresult mpsd_cast_issue_known(struct mpsd_cast *gone, const struct mpsd_op *op, CUgraphNode *native)
{
	bool names = op->kind == MPSD_OP_RECORD || op->kind == MPSD_OP_WAIT;
	CUevent event = names ? mpsd_native(op->event.event) : NULL;
	CUstream stream = mpsd_native(op->stream);
	CUresult result = CUDA_SUCCESS;

	if (mpsd_cast_is_gone(op->stream))
		result = mpsd_cast_stream(gone, op->stream, &stream);
	if (result == CUDA_SUCCESS && names && (op->event.is_elsewhere || mpsd_cast_is_gone(op->event.event)))
		result = mpsd_cast_event(gone, op->event.event, &event);
	if (result == CUDA_SUCCESS)
		result = mpsd_cast_joined(op, stream);
	if (result == CUDA_SUCCESS)
		result = mpsd_op_issue_on(op, stream, event);
	*native = (!names || mpsd_op_is_event_node(op)) && result == CUDA_SUCCESS ? mpsd_capture_last(stream) : NULL;
	return result;
}

void mpsd_cast_end(struct mpsd_cast *cast)
{
	for (unsigned int i = 0; i < cast->streams.count; i++)
		real_cuStreamDestroy_v2(cast->streams.natives[i]);
	for (unsigned int i = 0; i < cast->events.count; i++)
		real_cuEventDestroy_v2(cast->events.natives[i]);
}
