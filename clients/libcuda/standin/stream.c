// SPDX-License-Identifier: MIT
/*
 * Streams. Each has a thread from its first operation on. What an operation has to wait for is
 * written down when it is submitted, as moments of other streams; all of those lie in the past of
 * the submitter, so there are no circles.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "standin.h"

/* What it does it does at the end of its time, unless the context died meanwhile. The lock is held. */
static void run(CUcontext context, struct operation *operation)
{
	struct timespec end;

	clock_gettime(CLOCK_MONOTONIC, &end);
	add_nanoseconds(&end, operation->duration_ns);
	while (operation->duration_ns && !context->broken &&
	       pthread_cond_clockwait(&gpu_changed, &gpu_lock, CLOCK_MONOTONIC, &end) != ETIMEDOUT)
		;
	look_sometimes(context);
	if (!operation->run || !may_begin(context, operation))
		return;
	/* For functions of the host no reset waits. */
	if (operation->type == CU_GRAPH_NODE_TYPE_HOST)
		backend->end();
	operation->status = context->broken;
	pthread_mutex_unlock(&gpu_lock);
	operation->run(operation);
	pthread_mutex_lock(&gpu_lock);
	if (backend->end())
		await_news(context);
}

bool reached(struct moment moment)
{
	return !moment.stream || moment.stream->completed >= moment.number;
}

static bool is_due(const struct operation *operation)
{
	for (size_t i = 0; i < operation->moments; i++)
		if (!reached(operation->after[i]))
			return false;
	return true;
}

/* In a broken context operations end without having run, as on a GPU whose channel is gone. */
static void *work(void *argument)
{
	struct CUstream_st *stream = argument;
	struct operation *operation;

	working_for = stream->context;
	pthread_mutex_lock(&gpu_lock);
	for (;;) {
		operation = stream->first;
		if (!operation && stream->destroyed)
			break;
		if (!operation || !is_due(operation)) {
			pthread_cond_wait(&gpu_changed, &gpu_lock);
			continue;
		}
		if (!gate_lets(stream->context))
			continue;
		run(stream->context, operation);
		stream->first = operation->next;
		if (!stream->first)
			stream->last = NULL;
		stream->completed = operation->number;
		gate_ended();
		free(operation->after);
		free(operation);
		pthread_cond_broadcast(&gpu_changed);
	}
	stream->finished = true;
	pthread_cond_broadcast(&gpu_changed);
	pthread_mutex_unlock(&gpu_lock);
	return NULL;
}

static CUresult start(CUstream stream)
{
	if (!stream->started)
		stream->started = !pthread_create(&stream->thread, NULL, work, stream);
	return stream->started ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* A thread that called itself finished needs the lock no more, so it may be waited for with the lock held. */
void join_streams(CUcontext context)
{
	for (CUstream stream = context->streams; stream; stream = stream->next) {
		if (stream->finished && !stream->joined)
			pthread_join(stream->thread, NULL);
		stream->joined = stream->finished;
	}
}

static bool is_blocking(const struct CUstream_st *stream)
{
	return !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* The legacy stream comes after all blocking streams, and they come after it. */
static void order(CUstream stream, struct operation *operation)
{
	CUcontext context = stream->context;

	if (!is_blocking(stream))
		return;
	for (CUstream other = context->streams; other; other = other->next)
		if (other != stream && is_blocking(other) && other->submitted > other->completed &&
		    (stream == context->legacy || other == context->legacy))
			operation->after[operation->moments++] = (struct moment){ other, other->submitted };
}

static size_t count_streams(CUcontext context)
{
	size_t count = 0;

	for (CUstream stream = context->streams; stream; stream = stream->next)
		count++;
	return count;
}

/* The legacy stream would come after what a blocking stream captures. */
static CUresult refuse_legacy(CUstream legacy)
{
	CUresult result = CUDA_SUCCESS;

	for (CUstream stream = legacy->context->streams; stream; stream = stream->next) {
		if (stream->destroyed || !stream->capture || !is_blocking(stream))
			continue;
		result = spoil(stream, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	}
	return result;
}

CUresult submit_after(CUstream stream, const struct operation *given, struct moment moment)
{
	struct operation *operation;
	CUresult result;

	if (stream->capture)
		return capture(stream, given);
	result = stream == stream->context->legacy ? refuse_legacy(stream) : CUDA_SUCCESS;
	if (result == CUDA_SUCCESS)
		result = start(stream);
	if (result != CUDA_SUCCESS)
		return result;
	operation = malloc(sizeof(*operation));
	if (!operation)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*operation = *given;
	operation->next = NULL;
	operation->moments = 0;
	operation->after = malloc((count_streams(stream->context) + 1) * sizeof(*operation->after));
	if (!operation->after) {
		free(operation);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (moment.stream)
		operation->after[operation->moments++] = moment;
	order(stream, operation);
	operation->number = ++stream->submitted;
	if (stream->last)
		stream->last->next = operation;
	else
		stream->first = operation;
	stream->last = operation;
	pthread_cond_broadcast(&gpu_changed);
	return CUDA_SUCCESS;
}

CUresult submit(CUstream stream, const struct operation *operation)
{
	return submit_after(stream, operation, (struct moment){ NULL, 0 });
}

CUresult wait_for(CUcontext context, struct moment moment)
{
	while (!reached(moment) && !context->broken)
		wait_for_news(context);
	look_at(context);
	return context->broken;
}

CUresult wait_for_all(CUcontext context)
{
	CUresult result = CUDA_SUCCESS;

	for (CUstream stream = context->streams; stream && result == CUDA_SUCCESS; stream = stream->next)
		result = wait_for(context, (struct moment){ stream, stream->submitted });
	return result;
}

static CUstream new_stream(CUcontext context, unsigned int flags, int priority)
{
	CUstream stream = calloc(1, sizeof(*stream));

	join_streams(context);
	if (!stream)
		return NULL;
	*stream = (struct CUstream_st){
		.next = context->streams,
		.context = context,
		.flags = flags,
		.priority = priority,
		.attributes[CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY].syncPolicy = CU_SYNC_POLICY_AUTO,
	};
	context->streams = stream;
	return stream;
}

CUresult open_streams(CUcontext context)
{
	context->streams = NULL;
	context->legacy = new_stream(context, CU_STREAM_DEFAULT, 0);
	return context->legacy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void close_streams(CUcontext context)
{
	struct CUstream_st *next;

	for (CUstream stream = context->streams; stream; stream = stream->next)
		stream->destroyed = true;
	pthread_cond_broadcast(&gpu_changed);
	for (CUstream stream = context->streams; stream; stream = stream->next)
		while (stream->started && !stream->finished)
			pthread_cond_wait(&gpu_changed, &gpu_lock);
	join_streams(context);
	for (CUstream stream = context->streams; stream; stream = stream->next)
		drop_capture(stream);
	for (CUstream stream = context->streams; stream; stream = next) {
		next = stream->next;
		free(stream);
	}
	context->streams = context->legacy = NULL;
}

/* The calling thread's default stream, which ends with the context. */
static CUresult find_own(CUcontext context, CUstream *stream)
{
	for (*stream = context->streams; *stream; *stream = (*stream)->next)
		if ((*stream)->is_own && pthread_equal((*stream)->owner, pthread_self()))
			return CUDA_SUCCESS;
	*stream = new_stream(context, CU_STREAM_DEFAULT, 0);
	if (!*stream)
		return CUDA_ERROR_OUT_OF_MEMORY;
	(*stream)->is_own = true;
	(*stream)->owner = pthread_self();
	return CUDA_SUCCESS;
}

CUresult find_stream(CUcontext context, CUstream handle, CUstream *stream)
{
	if (handle == CU_STREAM_PER_THREAD)
		return find_own(context, stream);
	if (!handle || handle == CU_STREAM_LEGACY) {
		*stream = context->legacy;
		return CUDA_SUCCESS;
	}
	for (*stream = context->streams; *stream && *stream != handle;)
		*stream = (*stream)->next;
	if (!*stream)
		return CUDA_ERROR_INVALID_HANDLE;
	/* What NVIDIA's does then is not said anywhere, so nothing may rely on it. */
	if (handle->destroyed) {
		fputs("standin: a stream that was destroyed is used\n", stderr);
		abort();
	}
	return CUDA_SUCCESS;
}

CUresult enter_stream(CUstream handle, CUstream *stream)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = find_stream(context, handle, stream);
	return result == CUDA_SUCCESS ? result : leave(result);
}

API CUresult cuStreamCreateWithPriority(CUstream *phStream, unsigned int flags, int priority)
{
	CUcontext context;
	CUresult result = enter(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!phStream || flags > CU_STREAM_NON_BLOCKING)
		return leave(CUDA_ERROR_INVALID_VALUE);
	*phStream = new_stream(context, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority);
	return leave(*phStream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
}

API CUresult cuStreamCreate(CUstream *phStream, unsigned int Flags)
{
	return cuStreamCreateWithPriority(phStream, Flags, 0);
}

/* Returns at once: what was submitted still runs. The memory stays until the context ends. */
API CUresult cuStreamDestroy_v2(CUstream hStream)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (stream == stream->context->legacy)
		return leave(CUDA_ERROR_INVALID_HANDLE);
	drop_capture(stream);
	stream->destroyed = true;
	pthread_cond_broadcast(&gpu_changed);
	return leave(CUDA_SUCCESS);
}

API CUresult cuStreamSynchronize(CUstream hStream)
{
	CUstream stream;
	CUresult result = enter_stream(hStream, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (stream->capture)
		return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	/* The legacy stream stands for all that block with it. */
	if (stream == stream->context->legacy)
		for (CUstream other = stream->context->streams; other; other = other->next)
			if (is_blocking(other) && result == CUDA_SUCCESS)
				result = wait_for(stream->context,
						  (struct moment){ other, other->submitted });
	if (result == CUDA_SUCCESS)
		result = wait_for(stream->context, (struct moment){ stream, stream->submitted });
	return leave(result);
}

static CUresult query(CUstream handle)
{
	CUstream stream;
	CUresult result = enter_stream(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	look_sometimes(stream->context);
	if (stream->context->broken)
		return leave(stream->context->broken);
	return leave(stream->completed == stream->submitted ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

API CUresult cuStreamQuery(CUstream hStream)
{
	CUresult result = query(hStream);

	if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY)
		manager_called(current_context());
	return result;
}
