// SPDX-License-Identifier: MIT
/* Events: a moment of a stream, and when it was. An event that was never recorded is reached. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "standin.h"

/* Kept when destroyed, until the context ends: an operation may still point to it, and whoever uses it is found. */
struct CUevent_st {
	struct CUevent_st *next;
	CUcontext context;
	unsigned int flags;
	struct moment moment;
	bool destroyed;
	bool recorded;
	struct captured captured;		/* its last record */
	struct timespec when;
};

static struct CUevent_st *events;

static bool is_event(const struct CUevent_st *handle, CUcontext context)
{
	const struct CUevent_st *event = events;

	while (event && event != handle)
		event = event->next;
	/* As of a stream (stream.c). */
	if (event && event->destroyed) {
		fputs("standin: an event that was destroyed is used\n", stderr);
		abort();
	}
	return event && event->context == context;
}

static CUresult enter_event(CUevent event, CUcontext *context)
{
	CUresult result = enter(context);

	if (result != CUDA_SUCCESS)
		return result;
	return is_event(event, *context) ? CUDA_SUCCESS : leave(CUDA_ERROR_INVALID_HANDLE);
}

void close_events(CUcontext context)
{
	struct CUevent_st **link = &events, *event;

	while ((event = *link)) {
		if (event->context != context) {
			link = &event->next;
			continue;
		}
		*link = event->next;
		leave_place(&event->captured.place);
		free(event);
	}
}

static bool are_flags(unsigned int flags)
{
	return flags <= (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS) &&
	       (!(flags & CU_EVENT_INTERPROCESS) || flags & CU_EVENT_DISABLE_TIMING);
}

API CUresult cuEventCreate(CUevent *phEvent, unsigned int Flags)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!phEvent || !are_flags(Flags))
		return leave(CUDA_ERROR_INVALID_VALUE);
	*phEvent = calloc(1, sizeof(**phEvent));
	if (!*phEvent)
		return leave(CUDA_ERROR_OUT_OF_MEMORY);
	(*phEvent)->context = context;
	(*phEvent)->flags = Flags;
	(*phEvent)->next = events;
	events = *phEvent;
	return leave(CUDA_SUCCESS);
}

API CUresult cuEventDestroy_v2(CUevent hEvent)
{
	CUcontext context;
	CUresult result = enter_event(hEvent, &context);

	if (result != CUDA_SUCCESS)
		return result;
	hEvent->destroyed = true;
	return leave(CUDA_SUCCESS);
}

static void stamp(struct operation *operation)
{
	CUevent event = operation->event.event;

	pthread_mutex_lock(&gpu_lock);
	clock_gettime(CLOCK_MONOTONIC, &event->when);
	pthread_mutex_unlock(&gpu_lock);
}

API CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)
{
	struct operation operation = { .run = stamp, .always = true, .event = { hEvent } };
	CUcontext context;
	CUstream stream;
	CUresult result = enter_event(hEvent, &context);

	if (result != CUDA_SUCCESS)
		return result;
	if (flags > CU_EVENT_RECORD_EXTERNAL)
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = find_stream(context, hStream, &stream);
	if (result != CUDA_SUCCESS)
		return leave(result);
	operation.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
	if (stream->capture && flags & CU_EVENT_RECORD_EXTERNAL)
		return leave(capture(stream, &operation));
	result = capture_record(stream, &hEvent->captured);
	if (result != CUDA_SUCCESS || stream->capture)
		return leave(result);
	result = submit(stream, &operation);
	if (result == CUDA_SUCCESS) {
		hEvent->recorded = true;
		hEvent->moment = (struct moment){ stream, stream->submitted };
	}
	return leave(result);
}

API CUresult cuEventRecord(CUevent hEvent, CUstream hStream)
{
	return cuEventRecordWithFlags(hEvent, hStream, CU_EVENT_RECORD_DEFAULT);
}

API CUresult cuEventQuery(CUevent hEvent)
{
	CUcontext context;
	CUresult result = enter_event(hEvent, &context);

	if (result != CUDA_SUCCESS)
		return result;
	look_sometimes(context);
	if (context->broken)
		return leave(context->broken);
	if (hEvent->captured.id)
		return leave(CUDA_ERROR_CAPTURED_EVENT);
	return leave(reached(hEvent->moment) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

API CUresult cuEventSynchronize(CUevent hEvent)
{
	CUcontext context;
	CUresult result = enter_event(hEvent, &context);

	if (result != CUDA_SUCCESS)
		return result;
	return leave(hEvent->captured.id ? CUDA_ERROR_CAPTURED_EVENT : wait_for(context, hEvent->moment));
}

API CUresult cuEventElapsedTime_v2(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	CUcontext context;
	CUresult result = enter_event(hStart, &context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pMilliseconds || !is_event(hEnd, context) || !hStart->recorded ||
	    !hEnd->recorded || ((hStart->flags | hEnd->flags) & CU_EVENT_DISABLE_TIMING))
		return leave(CUDA_ERROR_INVALID_HANDLE);
	if (!reached(hStart->moment) || !reached(hEnd->moment))
		return leave(CUDA_ERROR_NOT_READY);
	*pMilliseconds = (float)(hEnd->when.tv_sec - hStart->when.tv_sec) * 1e3f +
			 (float)(hEnd->when.tv_nsec - hStart->when.tv_nsec) * 1e-6f;
	return leave(CUDA_SUCCESS);
}

#undef cuEventElapsedTime
API CUresult cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd);
API CUresult cuEventElapsedTime(float *pMilliseconds, CUevent hStart, CUevent hEnd)
{
	return cuEventElapsedTime_v2(pMilliseconds, hStart, hEnd);
}

API CUresult cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags)
{
	struct operation nothing = { .run = NULL, .type = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .event = { hEvent } };
	CUcontext context;
	CUstream stream;
	CUresult result = enter_event(hEvent, &context);
	bool is_never;

	if (result != CUDA_SUCCESS)
		return result;
	if (Flags > CU_EVENT_WAIT_EXTERNAL)
		return leave(CUDA_ERROR_INVALID_VALUE);
	result = find_stream(context, hStream, &stream);
	if (result != CUDA_SUCCESS)
		return leave(result);
	is_never = !hEvent->recorded && !hEvent->captured.id;
	if (stream->capture && Flags & CU_EVENT_WAIT_EXTERNAL)
		return leave(capture(stream, &nothing));
	if (stream->capture && is_never)
		return leave(is_spoiled(stream) ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS);
	if (stream->capture || hEvent->captured.id)
		return leave(capture_wait(stream, &hEvent->captured));
	return leave(submit_after(stream, &nothing, hEvent->moment));
}

/* In graphs */

CUresult prepare_event(CUevent event, CUgraphNodeType type, struct operation *operation)
{
	CUcontext context = primary_of(current_device());

	if (!is_event(event, context))
		return CUDA_ERROR_INVALID_VALUE;
	*operation = (struct operation){ .type = type, .event = { event } };
	if (type == CU_GRAPH_NODE_TYPE_EVENT_RECORD) {
		operation->run = stamp;
		operation->always = true;
	}
	return CUDA_SUCCESS;
}

CUresult submit_event(CUstream stream, const struct operation *operation)
{
	CUevent event = operation->event.event;
	CUresult result;

	if (operation->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT)
		return submit_after(stream, operation, event->moment);
	result = submit(stream, operation);
	if (result == CUDA_SUCCESS && !stream->capture) {
		event->recorded = true;
		event->captured.id = 0;
		event->moment = (struct moment){ stream, stream->submitted };
	}
	return result;
}
