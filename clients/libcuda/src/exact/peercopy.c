// SPDX-License-Identifier: MIT
/*
 * cuMemcpyPeer, as far as both contexts are the current one: a copy within it like any other, but that the GPU makes
 * it after all that it was given. With a second context the program is not carried over.
 */
#include "exact/state.h"
#include "failover/line.h"

static bool is_here(CUcontext one, CUcontext other)
{
	CUcontext current = NULL;

	return real_cuCtxGetCurrent(&current) == CUDA_SUCCESS && current && mpsd_native(one) == current &&
	       mpsd_native(other) == current;
}

/* False: it is the driver's alone. */
static bool look(CUcontext one, CUcontext other, const char *name)
{
	bool is = is_here(one, other);

	/* Of a call that a move overtakes nothing is known: it comes again. */
	if (!is && !mpsd_is_left())
		mpsd_line_opaque(name);
	return is;
}

static CUresult submit(CUdeviceptr to, CUdeviceptr from, CUcontext context, size_t size, CUstream stream, bool waits)
{
	const struct mpsd_op op = {
		.kind = MPSD_OP_COPY,
		.waits = waits,
		.stream = stream,
		.copy = { .way = MPSD_COPY_WITHIN, .to = to, .from = from, .size = size, .peer = context },
	};

	return mpsd_submit_new(&op, false);
}

static CUresult copy_now(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size)
{
	if (!mpsd_relay_flush())
		return MPSD_AGAIN;
	return mpsd_answered(inner_cuMemcpyPeer(mpsd_address(to), mpsd_native(to_context), mpsd_address(from),
						mpsd_native(from_context), size));
}

CUresult make_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
			   size_t ByteCount)
{
	look(dstContext, srcContext, "cuMemcpyPeer between two contexts");
	return copy_now(dstDevice, dstContext, srcDevice, srcContext, ByteCount);
}

CUresult work_cuMemcpyPeer(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice, CUcontext srcContext,
			   size_t ByteCount)
{
	if (!look(dstContext, srcContext, "cuMemcpyPeer between two contexts"))
		return copy_now(dstDevice, dstContext, srcDevice, srcContext, ByteCount);
	return submit(dstDevice, srcDevice, dstContext, ByteCount, CU_STREAM_LEGACY, true);
}

static CUresult copy(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t size,
		     CUstream stream)
{
	if (!mpsd_relay_flush())
		return MPSD_AGAIN;
	return mpsd_answered(inner_cuMemcpyPeerAsync(mpsd_address(to), mpsd_native(to_context), mpsd_address(from),
						     mpsd_native(from_context), size, mpsd_native(stream)));
}

CUresult make_cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
				CUcontext srcContext, size_t ByteCount, CUstream hStream)
{
	look(dstContext, srcContext, "cuMemcpyPeerAsync between two contexts");
	return copy(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream);
}

CUresult work_cuMemcpyPeerAsync(CUdeviceptr dstDevice, CUcontext dstContext, CUdeviceptr srcDevice,
				CUcontext srcContext, size_t ByteCount, CUstream hStream)
{
	if (!look(dstContext, srcContext, "cuMemcpyPeerAsync between two contexts"))
		return copy(dstDevice, dstContext, srcDevice, srcContext, ByteCount, hStream);
	return submit(dstDevice, srcDevice, dstContext, ByteCount, hStream, false);
}
