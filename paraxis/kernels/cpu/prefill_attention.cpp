// Attention of many queries, each of which sees the rows up to its own, on a CPU, in float32.
//
// A few queries at a time: their scores stay in the first cache between the two products and the weighing. Keys are laid
// out anew, sixteen rows side by side, so that a product is one number of each query times a vector of keys.

namespace {

constexpr int64_t QUERIES = 6, VECTORS = 2, SIDE = VECTORS * LANES;  // of a step: 12 sums, in as many registers

// out[q][0..16) (+)= sum over i of left[q][i] * right[i][0..16), for a few q.
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

// Sixteen keys side by side: packed[block][feature][key].
void pack(const float* keys, int64_t row, int64_t length, int64_t features, float* packed) {
    for (int64_t first = 0; first < length; first += SIDE) {
        const int64_t rows = length - first < SIDE ? length - first : SIDE;
        float* block = packed + first * features;
        for (int64_t f = 0; f < features; ++f)
            for (int64_t k = 0; k < SIDE; ++k) block[f * SIDE + k] = k < rows ? keys[(first + k) * row + f] : 0.0f;
    }
}

// What the first `seen` scores of a row weigh, in place; the rest, up to `room`, weighs nothing.
void weigh(float* scores, int64_t seen, int64_t room, float scale) {
    for (int64_t i = seen; i < room; ++i) scores[i] = -INFINITY;
    Floats high = load(scores);
    for (int64_t i = LANES; i < room; i += LANES) {
        const Floats next = load(scores + i);
        high = next > high ? next : high;
    }
    float highest = high[0];
    for (int i = 1; i < LANES; ++i) highest = high[i] > highest ? high[i] : highest;
    const float finite = highest == -INFINITY ? 0.0f : highest;  // where nothing weighs anything, the result is zero
    Floats sum = {};
    for (int64_t i = 0; i < room; i += LANES) {
        const Floats weights = exponential((load(scores + i) - finite) * scale);
        store(scores + i, weights);
        sum += weights;
    }
    for (int64_t i = seen; i < room; ++i) scores[i] = 0;
    const float share = highest == -INFINITY ? 0.0f : 1.0f / total(sum);
    for (int64_t i = 0; i < room; i += LANES) store(scores + i, load(scores + i) * share);
}

}  // namespace

struct Causal {
    const float *query, *keys, *values;
    float *out, *room;  // room: of every thread, for its keys and scores
    int64_t threads, batch, heads, groups, queries, length, features;  // heads of keys, of queries for each
    int64_t query_batch, query_head, query_row, keys_batch, keys_head, keys_row, values_batch, values_head, values_row;
    int64_t out_batch, out_head, out_row;
    double scale;
};

inline int64_t rounded(int64_t length) { return (length + SIDE - 1) / SIDE * SIDE; }

// A few queries of a head, of which the first is number `first`.
template <int COUNT>
void some(const Causal& c, const float* query, const float* packed, const float* values, float* scores, float* out,
          int64_t first) {
    const int64_t last = first + COUNT < c.length ? first + COUNT : c.length, room = rounded(last);
    const int64_t row = rounded(c.length);
    for (int64_t at = 0; at < room; at += SIDE)
        multiply<COUNT, VECTORS>(query + first * c.query_row, c.query_row, packed + at * c.features, SIDE, scores + at,
                                 row, c.features);
    for (int64_t q = 0; q < COUNT; ++q) {
        const int64_t seen = first + q + 1 < c.length ? first + q + 1 : c.length;
        weigh(scores + q * row, seen, room, static_cast<float>(c.scale));
    }
    float* to = out + first * c.out_row;
    int64_t at = 0;
    for (; at + SIDE <= c.features; at += SIDE)
        multiply<COUNT, VECTORS>(scores, row, values + at, c.values_row, to + at, c.out_row, last);
    for (; at < c.features; at += LANES)
        multiply<COUNT, 1>(scores, row, values + at, c.values_row, to + at, c.out_row, last);
}

// One head of keys and values, with its queries.
void attend_head(const Causal& c, int64_t b, int64_t h, float* packed) {
    float* scores = packed + rounded(c.length) * c.features;
    pack(c.keys + b * c.keys_batch + h * c.keys_head, c.keys_row, c.length, c.features, packed);
    const float* values = c.values + b * c.values_batch + h * c.values_head;
    for (int64_t g = h * c.groups; g < (h + 1) * c.groups; ++g) {
        const float* query = c.query + b * c.query_batch + g * c.query_head;
        float* out = c.out + b * c.out_batch + g * c.out_head;
        int64_t first = 0;
        for (; first + QUERIES <= c.queries; first += QUERIES)
            some<QUERIES>(c, query, packed, values, scores, out, first);
        for (; first < c.queries; ++first) some<1>(c, query, packed, values, scores, out, first);
    }
}

extern "C" void run(const Causal* call) {
    const Causal& c = *call;
#pragma omp parallel for num_threads(c.threads) if (c.threads > 1)
    for (int64_t i = 0; i < c.batch * c.heads; ++i) {
        float* room = c.room + omp_get_thread_num() * rounded(c.length) * (c.features + QUERIES);
        attend_head(c, i / c.heads, i % c.heads, room);
    }
}
