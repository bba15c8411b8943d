// Prefill attention: many queries with a causal mask, on a CPU, in float32.
//
// A tile of a few queries at a time: their scores stay in the L1 cache between the two matmuls and the softmax. Keys
// are packed, sixteen rows side by side, so that the matmul multiplies one feature of each query by a vector of keys.

namespace {

constexpr int64_t QUERY_BLOCK = 6, VECTORS = 2, KEY_BLOCK = VECTORS * LANES;  // 12 sums, in as many registers

// out[q][0..16) = sum over i of left[q][i] * right[i][0..16), for COUNT queries q.
template <int COUNT, int WIDTH>
inline void multiply(const float* left, int64_t left_row, const float* right, int64_t right_row, float* out,
                     int64_t out_row, int64_t length) {
    Floats sum[COUNT][WIDTH] = {};
    for (int64_t i = 0; i < length; ++i) {
        Floats part[WIDTH];
        for (int w = 0; w < WIDTH; ++w) part[w] = load(right + i * right_row + w * LANES);
        for (int q = 0; q < COUNT; ++q)
            for (int w = 0; w < WIDTH; ++w) sum[q][w] += left[q * left_row + i] * part[w];
    }
    for (int q = 0; q < COUNT; ++q)
        for (int w = 0; w < WIDTH; ++w) store(out + q * out_row + w * LANES, sum[q][w]);
}

// Packs sixteen keys side by side: packed[block][feature][key].
void pack(const float* keys, int64_t row, int64_t length, int64_t features, float* packed) {
    for (int64_t first = 0; first < length; first += KEY_BLOCK) {
        const int64_t rows = length - first < KEY_BLOCK ? length - first : KEY_BLOCK;
        float* block = packed + first * features;
        for (int64_t f = 0; f < features; ++f)
            for (int64_t k = 0; k < KEY_BLOCK; ++k)
                block[f * KEY_BLOCK + k] = k < rows ? keys[(first + k) * row + f] : 0.0f;
    }
}

// softmax(scale * scores) of the first `visible` scores of a row, in place; zeros from there to `padded`.
void softmax(float* scores, int64_t visible, int64_t padded, float scale) {
    for (int64_t i = visible; i < padded; ++i) scores[i] = -INFINITY;
    Floats high = load(scores);
    for (int64_t i = LANES; i < padded; i += LANES) {
        const Floats next = load(scores + i);
        high = next > high ? next : high;
    }
    float highest = high[0];
    for (int i = 1; i < LANES; ++i) highest = high[i] > highest ? high[i] : highest;
    const float finite = highest == -INFINITY ? 0.0f : highest;  // every key is masked: the result is zero
    Floats sum = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        const Floats weights = exponential((load(scores + i) - finite) * scale);
        store(scores + i, weights);
        sum += weights;
    }
    for (int64_t i = visible; i < padded; ++i) scores[i] = 0;
    const float normalizer = highest == -INFINITY ? 0.0f : 1.0f / total(sum);
    for (int64_t i = 0; i < padded; i += LANES) store(scores + i, load(scores + i) * normalizer);
}

}  // namespace

struct Call {
    const float *query, *keys, *values;
    float *out, *scratch;  // scratch: per thread, packed keys and scores
    int64_t threads, batch, heads, groups, queries, length, features;  // key heads, query heads of each
    int64_t query_batch, query_head, query_row, keys_batch, keys_head, keys_row, values_batch, values_head, values_row;
    int64_t out_batch, out_head, out_row;
    double scale;
};

inline int64_t rounded(int64_t length) { return (length + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK; }

// COUNT queries of a head, starting with query `first`.
template <int COUNT>
void attend_tile(const Call& c, const float* query, const float* packed, const float* values, float* scores, float* out,
                 int64_t first) {
    const int64_t last = first + COUNT < c.length ? first + COUNT : c.length, padded = rounded(last);
    const int64_t row = rounded(c.length);
    for (int64_t at = 0; at < padded; at += KEY_BLOCK)
        multiply<COUNT, VECTORS>(query + first * c.query_row, c.query_row, packed + at * c.features, KEY_BLOCK,
                                 scores + at, row, c.features);
    for (int64_t q = 0; q < COUNT; ++q) {
        const int64_t visible = first + q + 1 < c.length ? first + q + 1 : c.length;
        softmax(scores + q * row, visible, padded, static_cast<float>(c.scale));
    }
    float* to = out + first * c.out_row;
    int64_t at = 0;
    for (; at + KEY_BLOCK <= c.features; at += KEY_BLOCK)
        multiply<COUNT, VECTORS>(scores, row, values + at, c.values_row, to + at, c.out_row, last);
    for (; at < c.features; at += LANES)
        multiply<COUNT, 1>(scores, row, values + at, c.values_row, to + at, c.out_row, last);
}

// One key head, with all its query heads.
void attend_head(const Call& c, int64_t b, int64_t h, float* packed) {
    float* scores = packed + rounded(c.length) * c.features;
    pack(c.keys + b * c.keys_batch + h * c.keys_head, c.keys_row, c.length, c.features, packed);
    const float* values = c.values + b * c.values_batch + h * c.values_head;
    for (int64_t g = h * c.groups; g < (h + 1) * c.groups; ++g) {
        const float* query = c.query + b * c.query_batch + g * c.query_head;
        float* out = c.out + b * c.out_batch + g * c.out_head;
        int64_t first = 0;
        for (; first + QUERY_BLOCK <= c.queries; first += QUERY_BLOCK)
            attend_tile<QUERY_BLOCK>(c, query, packed, values, scores, out, first);
        for (; first < c.queries; ++first) attend_tile<1>(c, query, packed, values, scores, out, first);
    }
}

extern "C" void run(const Call* call) {
    const Call& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.batch * c.heads; ++i) {
        float* scratch = c.scratch + omp_get_thread_num() * rounded(c.length) * (c.features + QUERY_BLOCK);
        attend_head(c, i / c.heads, i % c.heads, scratch);
    }
}
