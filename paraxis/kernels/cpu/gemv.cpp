// GEMV: one to four rows times a weight matrix, on a CPU, in float32.
//
// It is bound by reading the weight once, at the bandwidth of the memory. The hardware prefetcher follows several
// sequential streams independently; a single stream does not saturate the memory. So the weight is read as STREAMS
// streams far from one another.

namespace {

constexpr int64_t STREAMS = 4;

}  // namespace

struct Call {
    const float *rows, *weight, *bias;  // no bias: null
    float* out;                         // contiguous
    int64_t threads, count, inputs, outputs;
    int64_t row_stride, weight_stride;  // of the outputs in a row-major weight, of the inputs in a column-major one
    int64_t column_major;
};

// Outputs first to last of a row-major weight: the weights of an output are contiguous.
template <int COUNT>
void row_major(const Call& c, int64_t first, int64_t last) {
    const int64_t each = (last - first) / STREAMS, vectorized = c.inputs / LANES * LANES;
    for (int64_t n = 0; n < each; ++n) {
        const float* from[STREAMS];
        for (int s = 0; s < STREAMS; ++s) from[s] = c.weight + (first + s * each + n) * c.weight_stride;
        Floats sum[COUNT][STREAMS] = {};
        for (int64_t k = 0; k < vectorized; k += LANES) {
            Floats weights[STREAMS];
            for (int s = 0; s < STREAMS; ++s) weights[s] = load(from[s] + k);
            for (int r = 0; r < COUNT; ++r) {
                const Floats row = load(c.rows + r * c.row_stride + k);
                for (int s = 0; s < STREAMS; ++s) sum[r][s] += row * weights[s];
            }
        }
        for (int r = 0; r < COUNT; ++r)
            for (int s = 0; s < STREAMS; ++s) {
                const int64_t at = first + s * each + n;
                float value = total(sum[r][s]);
                for (int64_t k = vectorized; k < c.inputs; ++k) value += c.rows[r * c.row_stride + k] * from[s][k];
                c.out[r * c.outputs + at] = c.bias ? value + c.bias[at] : value;
            }
    }
    for (int64_t at = first + STREAMS * each; at < last; ++at)
        for (int r = 0; r < COUNT; ++r) {
            const float *row = c.rows + r * c.row_stride, *weights = c.weight + at * c.weight_stride;
            Floats sum = {};
            for (int64_t k = 0; k < vectorized; k += LANES) sum += load(row + k) * load(weights + k);
            float value = total(sum);
            for (int64_t k = vectorized; k < c.inputs; ++k) value += row[k] * weights[k];
            c.out[r * c.outputs + at] = c.bias ? value + c.bias[at] : value;
        }
}

// Outputs first to last of a column-major weight: the weights of an input are contiguous.
template <int COUNT>
void column_major(const Call& c, int64_t first, int64_t last) {
    const int64_t each = c.inputs / STREAMS, vectorized = first + (last - first) / LANES * LANES;
    for (int r = 0; r < COUNT; ++r)
        for (int64_t n = first; n < last; ++n) c.out[r * c.outputs + n] = c.bias ? c.bias[n] : 0;
    for (int64_t k = 0; k < each; ++k) {
        const float* from[STREAMS];
        float factors[COUNT][STREAMS];
        for (int s = 0; s < STREAMS; ++s) {
            from[s] = c.weight + (s * each + k) * c.weight_stride;
            for (int r = 0; r < COUNT; ++r) factors[r][s] = c.rows[r * c.row_stride + s * each + k];
        }
        for (int64_t n = first; n < vectorized; n += LANES) {
            Floats weights[STREAMS];
            for (int s = 0; s < STREAMS; ++s) weights[s] = load(from[s] + n);
            for (int r = 0; r < COUNT; ++r) {
                float* out = c.out + r * c.outputs + n;
                Floats sum = factors[r][0] * weights[0];  // summed before it is added to out: smaller rounding error
                for (int s = 1; s < STREAMS; ++s) sum += factors[r][s] * weights[s];
                store(out, load(out) + sum);
            }
        }
        for (int64_t n = vectorized; n < last; ++n)
            for (int r = 0; r < COUNT; ++r)
                for (int s = 0; s < STREAMS; ++s) c.out[r * c.outputs + n] += factors[r][s] * from[s][n];
    }
    for (int64_t k = STREAMS * each; k < c.inputs; ++k)
        for (int r = 0; r < COUNT; ++r)
            for (int64_t n = first; n < last; ++n)
                c.out[r * c.outputs + n] += c.rows[r * c.row_stride + k] * c.weight[k * c.weight_stride + n];
}

// The share of the outputs of one thread.
template <int COUNT>
void run_thread(const Call& c, int64_t thread) {
    const int64_t each = (c.outputs + c.threads * LANES - 1) / (c.threads * LANES) * LANES;
    const int64_t first = thread * each < c.outputs ? thread * each : c.outputs;
    const int64_t last = first + each < c.outputs ? first + each : c.outputs;
    c.column_major ? column_major<COUNT>(c, first, last) : row_major<COUNT>(c, first, last);
}

extern "C" void run(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t thread = 0; thread < c.threads; ++thread) {
        if (c.count == 1) run_thread<1>(c, thread);
        if (c.count == 2) run_thread<2>(c, thread);
        if (c.count == 3) run_thread<3>(c, thread);
        if (c.count == 4) run_thread<4>(c, thread);
    }
}
