// SPDX-License-Identifier: MIT
/*
 * Tensor maps are parameters that kernels write through. The driver makes them without the GPU, and what matters here
 * is that the address can be found in them as in any other parameter (params.c).
 */
#include <string.h>

#include "exact/state.h"

static CUresult look(CUresult result, const CUtensorMap *map, const void *address)
{
	const char *bytes = (const char *)map;
	bool is = result != CUDA_SUCCESS || !mpsd_exact();

	for (size_t at = 0; !is && at < sizeof(*map); at += sizeof(address))
		is = !memcmp(bytes + at, &address, sizeof(address));
	if (!is)
		mpsd_exact_fail("a tensor map with an unknown address");
	return result;
}

CUresult make_cuTensorMapEncodeTiled(CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType,
				     cuuint32_t tensorRank, void *globalAddress, const cuuint64_t *globalDim,
				     const cuuint64_t *globalStrides, const cuuint32_t *boxDim,
				     const cuuint32_t *elementStrides, CUtensorMapInterleave interleave,
				     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2Promotion,
				     CUtensorMapFloatOOBfill oobFill)
{
	return look(inner_cuTensorMapEncodeTiled(tensorMap, tensorDataType, tensorRank, globalAddress, globalDim,
						 globalStrides, boxDim, elementStrides, interleave, swizzle,
						 l2Promotion, oobFill), tensorMap, globalAddress);
}

CUresult make_cuTensorMapEncodeIm2col(CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType,
				      cuuint32_t tensorRank, void *globalAddress, const cuuint64_t *globalDim,
				      const cuuint64_t *globalStrides, const int *pixelBoxLowerCorner,
				      const int *pixelBoxUpperCorner, cuuint32_t channelsPerPixel,
				      cuuint32_t pixelsPerColumn, const cuuint32_t *elementStrides,
				      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
				      CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill)
{
	return look(inner_cuTensorMapEncodeIm2col(tensorMap, tensorDataType, tensorRank, globalAddress, globalDim,
						  globalStrides, pixelBoxLowerCorner, pixelBoxUpperCorner,
						  channelsPerPixel, pixelsPerColumn, elementStrides, interleave,
						  swizzle, l2Promotion, oobFill), tensorMap, globalAddress);
}
