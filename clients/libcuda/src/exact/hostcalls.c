// SPDX-License-Identifier: MIT
/* The program's calls that put functions of the host into streams. */
#include <stdlib.h>

#include "exact/hostfunc.h"
#include "failover/graph.h"
#include "failover/line.h"

CUresult mpsd_host_hand_over(const struct mpsd_host *host, CUstream stream, CUhostFn function,
			     CUstreamCallback callback, void *data)
{
	switch (host->kind) {
	case CALLBACK:
		return inner_cuStreamAddCallback(stream, callback, data, host->flags);
#ifdef MPSD_cuLaunchHostFunc_v2
	case WITH_MODE:
		return inner_cuLaunchHostFunc_v2(stream, function, data, host->flags);
#endif
	default:
		return inner_cuLaunchHostFunc(stream, function, data);
	}
}

struct mpsd_op *mpsd_call_of_node(CUhostFn function, void *data)
{
	struct mpsd_op *op = calloc(1, sizeof(*op));

	if (!op)
		return NULL;
	op->kind = MPSD_OP_CALL;
	op->call.function = function;
	op->call.data = data;
	return op;
}

static struct mpsd_host *new_host(const struct mpsd_host *given)
{
	struct mpsd_host *host = malloc(sizeof(*host));

	if (host)
		*host = *given;
	return host;
}

/* Not noted. */
static CUresult make(const struct mpsd_host *given)
{
	struct mpsd_host *host = new_host(given);
	CUresult result;

	if (!host)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = mpsd_host_issue(host, mpsd_native(given->stream));
	mpsd_host_let_go(host);
	return result;
}

static CUresult work(const struct mpsd_host *given)
{
	struct mpsd_op *op = calloc(1, sizeof(*op));
	struct mpsd_host *host = new_host(given);

	if (!op || !host) {
		free(op);
		free(host);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	op->kind = MPSD_OP_HOST;
	op->stream = given->stream;
	op->host = host;
	return mpsd_submit(op, false);
}

/* It becomes a node of a graph, and runs with each launch of that. */
static CUresult capture(const struct mpsd_host *given)
{
	struct mpsd_op *op = mpsd_call_of_node(given->function, given->data);

	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->stream = given->stream;
	return mpsd_submit(op, false);
}

/* What is refused is the driver's to refuse. */
static CUresult start(struct mpsd_host given, CUresult (*how)(const struct mpsd_host *given))
{
	bool is_none = given.kind == CALLBACK ? !given.callback : !given.function;
	CUresult result;

	given.holders = 1;
	/* The driver is asked: there are ways to capture that are not followed. */
	if (!is_none && !mpsd_is_in_capture(given.stream))
		return how(&given);
	if (!is_none && given.kind == PLAIN)
		return capture(&given);
	result = mpsd_host_hand_over(&given, mpsd_native(given.stream), given.function, given.callback, given.data);
	return mpsd_line_made(result, "a host callback in a graph");
}

CUresult make_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	return start((struct mpsd_host){ .stream = hStream, .function = fn, .data = userData }, make);
}

CUresult work_cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void *userData)
{
	return start((struct mpsd_host){ .stream = hStream, .function = fn, .data = userData }, work);
}

#ifdef MPSD_cuLaunchHostFunc_v2
static struct mpsd_host with_mode(CUstream stream, CUhostFn function, void *data, unsigned int mode)
{
	return (struct mpsd_host){ .kind = WITH_MODE, .stream = stream, .function = function, .data = data,
				   .flags = mode };
}

CUresult make_cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode)
{
	return start(with_mode(hStream, fn, userData, syncMode), make);
}

CUresult work_cuLaunchHostFunc_v2(CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode)
{
	return start(with_mode(hStream, fn, userData, syncMode), work);
}
#endif

static struct mpsd_host callback_of(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags)
{
	return (struct mpsd_host){ .kind = CALLBACK, .stream = stream, .callback = callback, .data = data,
				   .flags = flags };
}

CUresult make_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
	return start(callback_of(hStream, callback, userData, flags), make);
}

CUresult work_cuStreamAddCallback(CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags)
{
	return start(callback_of(hStream, callback, userData, flags), work);
}
