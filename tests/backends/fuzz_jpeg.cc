// Compares jpeg.h with libjpeg-turbo on damaged files; the sanitizers watch.
//
//   fuzz_jpeg ROUNDS SEED [FILE ...]
//
// What jpeg.h takes must be what libjpeg takes without a warning, and come out the same. A window that it takes must be
// the same lines of libjpeg's, which may find damage below. Seeds: images of all kinds that libjpeg encodes, and the files.
// A damaged file that takes jpeg.h along branches that none took before becomes a seed (g++ -fsanitize-coverage=trace-pc).
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include <jpeglib.h>

#include "jpeg.h"

using dali_tf_input::jpeg::Decoder;
using dali_tf_input::jpeg::Window;
typedef std::string Bytes;

static std::mt19937_64 source;
static int Below(int bound) { return static_cast<int>(source() % static_cast<uint64_t>(bound)); }

// How often each pair of places in jpeg.h followed each other for a file, and the bits of all files' counts.
static uint8_t edges[1 << 16], all_edges[1 << 16];
static bool is_counting = false;

// Called at every branch, so it is not checked itself: that took most of the time.
#define UNCHECKED __attribute__((no_sanitize_coverage, no_sanitize("address", "undefined")))
extern "C" UNCHECKED void __sanitizer_cov_trace_pc() {
  if (!is_counting) return;
  static uintptr_t before = 0;
  const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& edge = edges[(here ^ before) % sizeof edges];
  before = here << 1;
  edge = static_cast<uint8_t>(edge + (edge < 255));
}

// Whether the last file went where none went before, or a number of times that has another highest bit.
UNCHECKED static bool IsNew() {
  bool is_new = false;
  for (size_t start = 0; start < sizeof edges; start += 8) {
    if (!std::memcmp(edges + start, "\0\0\0\0\0\0\0", 8)) continue;  // nearly all
    for (size_t at = start; at < start + 8; ++at) {
      if (!edges[at]) continue;
      const uint8_t highest = static_cast<uint8_t>(1 << (31 - __builtin_clz(edges[at])));
      is_new |= !(all_edges[at] & highest);
      all_edges[at] |= highest, edges[at] = 0;
    }
  }
  return is_new;
}

struct Errors : jpeg_error_mgr {
  std::jmp_buf jump;
  Errors() {
    jpeg_std_error(this);
    error_exit = [](j_common_ptr common) { std::longjmp(static_cast<Errors*>(common->err)->jump, 1); };
    emit_message = [](j_common_ptr common, int level) { common->err->num_warnings += level < 0; };
  }
};

// What libjpeg makes of a file.
struct Reference {
  int height = 0, width = 0, lines = 0;  // lines: before an error
  bool is_whole = false;
  long warnings = 0;
  std::vector<uint8_t> pixels;

  void Decode(const Bytes& file) {
    Errors errors;
    jpeg_decompress_struct info;
    info.err = &errors;
    lines = height = width = 0, is_whole = false;
    jpeg_create_decompress(&info);
    if (!setjmp(errors.jump)) {
      jpeg_mem_src(&info, reinterpret_cast<const uint8_t*>(file.data()), file.size());
      // A cut file is an error of TensorFlow's; libjpeg's own source makes up an end, and warns.
      jpeg_read_header(&info, TRUE);
      if (int64_t{info.image_height} * info.image_width <= 1 << 20) {
        info.out_color_space = JCS_RGB, info.dct_method = JDCT_ISLOW;
        jpeg_start_decompress(&info);
        height = static_cast<int>(info.output_height), width = static_cast<int>(info.output_width);
        pixels.assign(size_t{3} * info.output_height * info.output_width, 0);
        for (; lines < height; ++lines) {
          JSAMPROW line = pixels.data() + size_t{3} * info.output_width * static_cast<size_t>(lines);
          jpeg_read_scanlines(&info, &line, 1);
        }
        jpeg_finish_decompress(&info);
        is_whole = true;
      }
    }
    warnings = errors.num_warnings;
    jpeg_destroy_decompress(&info);
  }
};

struct Encoding {
  int height, width, across, down, quality, restart;
  bool is_gray, is_progressive, is_arithmetic, is_optimized, is_cmyk;
};

// Returns nothing where this libjpeg cannot.
static Bytes Encode(const Encoding& how) {
  Errors errors;
  jpeg_compress_struct info;
  info.err = &errors;
  uint8_t* out = nullptr;
  unsigned long size = 0;
  if (setjmp(errors.jump)) return jpeg_destroy_compress(&info), std::free(out), Bytes();
  jpeg_create_compress(&info);
  jpeg_mem_dest(&info, &out, &size);
  info.image_height = static_cast<JDIMENSION>(how.height), info.image_width = static_cast<JDIMENSION>(how.width);
  info.input_components = how.is_gray ? 1 : how.is_cmyk ? 4 : 3;
  info.in_color_space = how.is_gray ? JCS_GRAYSCALE : how.is_cmyk ? JCS_CMYK : JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, how.quality, Below(2));
  info.comp_info[0].h_samp_factor = how.across, info.comp_info[0].v_samp_factor = how.down;
  info.restart_interval = static_cast<unsigned>(how.restart);
  info.optimize_coding = how.is_optimized, info.arith_code = how.is_arithmetic;
  if (how.is_progressive) jpeg_simple_progression(&info);
  jpeg_start_compress(&info, TRUE);
  const uint8_t text[] = "something that is not the image";
  if (Below(2)) jpeg_write_marker(&info, JPEG_APP0 + 1 + Below(13), text, sizeof text);
  if (Below(2)) jpeg_write_marker(&info, JPEG_COM, text, sizeof text);
  const int noise = 1 + Below(120), slope = Below(9);
  std::vector<uint8_t> row(static_cast<size_t>(info.input_components * how.width));
  for (int y = 0; y < how.height; ++y) {
    for (size_t x = 0; x < row.size(); ++x) row[x] = static_cast<uint8_t>(slope * (y + static_cast<int>(x)) + Below(noise));
    JSAMPROW line = row.data();
    jpeg_write_scanlines(&info, &line, 1);
  }
  jpeg_finish_compress(&info);
  Bytes file(reinterpret_cast<char*>(out), size);
  jpeg_destroy_compress(&info);
  std::free(out);
  return file;
}

static Bytes Damage(Bytes file, const Bytes& other) {
  for (int times = Below(4) ? 1 : Below(6); times > 0 && file.size() > 4; --times) {
    const size_t size = file.size(), at = source() % size, few = 1 + source() % 16;
    switch (Below(10)) {
      case 0: file[at] = static_cast<char>(file[at] ^ 1 << Below(8)); break;
      case 1: file[at] = static_cast<char>(source()); break;
      case 2: file[at] = static_cast<char>(Below(2) ? 0xFF : 0); break;
      case 3: file.erase(at, few); break;
      case 4: file.insert(at, file.substr(source() % size, few)); break;
      case 5: file.resize(at); break;
      case 6: file.insert(at, {static_cast<char>(0xFF), static_cast<char>(0xC0 + Below(64))}); break;
      case 7: file.replace(at, few, other.substr(at < other.size() ? at : 0, few)); break;
      case 8: file[at % 700 % size] = static_cast<char>(source()); break;  // more often what comes before the scan
      case 9: file += other.substr(source() % other.size(), few); break;
    }
  }
  return file;
}

struct Sink {
  std::vector<uint8_t>& pixels;
  std::vector<uint8_t> line;
  int top, width;
  uint8_t* Want(int) { return line.assign(static_cast<size_t>(3 * width) + 48, 0), line.data(); }
  void Take(int number) {
    std::memcpy(pixels.data() + static_cast<size_t>((number - top) * 3 * width), line.data(), static_cast<size_t>(3 * width));
  }
};

// Decodes a window; returns whether it was taken.
static bool Take(Decoder* decoder, const Bytes& file, Window window, bool is_whole, std::vector<uint8_t>* pixels) {
  // Of its very size, so that a read beyond it is found.
  std::vector<uint8_t> exact(file.begin(), file.end());
  if (!decoder->Open(exact.data(), exact.size()) || int64_t{decoder->height} * decoder->width > 1 << 20) return false;
  if (is_whole) window = {0, 0, decoder->height, decoder->width};
  if (window.bottom > decoder->height || window.right > decoder->width) return false;
  pixels->assign(static_cast<size_t>(3 * (window.bottom - window.top) * (window.right - window.left)), 0);
  return decoder->Decode(window, is_whole, Sink{*pixels, {}, window.top, window.right - window.left});
}

int main(int count, char** arguments) {
  const long rounds = std::atol(arguments[1]);
  source.seed(static_cast<uint64_t>(std::atol(arguments[2])));
  std::vector<Bytes> seeds;
  for (int number = 3; number < count; ++number) {
    std::ifstream stream(arguments[number], std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  const size_t files = seeds.size();
  const int samplings[][2] = {{1, 1}, {2, 1}, {2, 2}, {1, 2}, {4, 1}};
  for (int number = 0; number < 300; ++number) {
    const int kind = number % 20, *sampling = samplings[kind < 15 ? number % 3 : number % 5];
    const Bytes file = Encode({1 + Below(50), 1 + Below(70), sampling[0], sampling[1], 1 + Below(100), Below(3) ? 0 : 1 + Below(5),
                            kind == 1, kind == 15, kind == 16, number % 2 == 0, kind == 17});
    if (!file.empty()) seeds.push_back(file);
  }
  Decoder decoder;
  Reference reference;
  std::vector<uint8_t> pixels;
  long taken = 0, windows = 0, whole = 0, refused_sound = 0, found = 0;
  const long sound = static_cast<long>(seeds.size());
  for (long round = 0; round < rounds; ++round) {
    const bool is_sound = round < sound;
    const Bytes seed = seeds[is_sound ? static_cast<size_t>(round) : source() % seeds.size()];
    const Bytes file = is_sound ? seed : Damage(seed, seeds[files + source() % (seeds.size() - files)]);
    reference.Decode(file);
    const char* wrong = nullptr;
    is_counting = true;
    const bool is_taken = Take(&decoder, file, {}, true, &pixels);
    is_counting = false;
    if (IsNew() && !is_sound && file.size() > 4 && file.size() < 20'000) seeds.push_back(file), ++found;
    whole += reference.is_whole && !reference.warnings;
    if (is_taken) {
      ++taken;
      if (!reference.is_whole) wrong = "libjpeg refuses it";
      else if (reference.warnings) wrong = "libjpeg warns";
      else if (pixels != reference.pixels) wrong = "other pixels";
    } else if (is_sound && reference.is_whole) {
      ++refused_sound;
    }
    if (reference.height && !wrong) {
      Window window;
      window.top = Below(reference.height), window.left = Below(reference.width) & ~15;
      window.bottom = window.top + 1 + Below(reference.height - window.top);
      window.right = window.left + 1 + Below(reference.width - window.left);
      if (Take(&decoder, file, window, false, &pixels)) {
        ++windows;
        if (reference.lines < window.bottom) wrong = "libjpeg refuses it before the end of a window";
        const size_t line = static_cast<size_t>(3 * (window.right - window.left));
        for (int y = window.top; y < window.bottom && !wrong; ++y) {
          const uint8_t* expected = reference.pixels.data() + 3 * (size_t{1} * y * reference.width + window.left);
          if (std::memcmp(pixels.data() + (y - window.top) * line, expected, line)) wrong = "other pixels in a window";
        }
      }
    }
    if (wrong) {
      std::ofstream("wrong.jpg", std::ios::binary) << file;
      std::printf("round %ld: %s; the file is wrong.jpg\n", round, wrong);
      return 1;
    }
  }
  std::printf("%ld rounds: libjpeg took %ld without a warning, jpeg.h %ld, and %ld windows; %ld of %ld sound seeds refused,"
              " %ld found\n", rounds, whole, taken, windows, refused_sound, sound, found);
}
