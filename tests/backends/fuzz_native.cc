// Runs resample.h over random images, regions and work, augment.h over random rows, mix.h over random mixes, decode.h over
// random parts of images, also what their checks refuse, and format.h and orientation.h over random bytes; the sanitizers
// watch.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "augment.h"
#include "decode.h"
#include "format.h"
#include "mix.h"

using namespace dali_tf_input;

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  long found[2] = {}, shown = 0;
  std::mt19937_64 random(1);
  auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  auto part = [&] { return std::uniform_real_distribution<double>(0, 1)(random); };
  const double odd[] = {-1, -0.5, 0, 1e-300, 0.5, 1, 1e9, 1e300, -1e300, NAN, INFINITY};
  const int kinds[][2] = {{1, 1}, {1, 900}, {900, 1}, {65500, 1}, {1, 65500}, {37, 53}, {300, 200}};
  const int sizes[] = {4, 2, 2, 1};
  long done = 0, refused = 0;
  for (int round = 0; round < rounds; ++round) {
    Image image;
    const int* kind = kinds[below(7)];
    image.height = kind[0], image.width = kind[1], image.mirror = below(2), image.orientation = 1 + static_cast<int>(below(8));
    std::vector<uint8_t> pixels(3 * image.height * image.width);
    for (auto& pixel : pixels) pixel = static_cast<uint8_t>(random());
    for (int axis = 0; axis < 2; ++axis) {
      const double size = static_cast<double>(image.Shown(axis));
      image.extent[axis] = size * part();
      image.start[axis] = (size - image.extent[axis]) * part();
      if (!below(3)) image.start[axis] = std::floor(image.start[axis]), image.extent[axis] = std::ceil(image.extent[axis]);
      if (!below(20)) image.start[axis] = odd[below(11)];
      if (!below(20)) image.extent[axis] = odd[below(11)];
    }
    Work work;
    work.height = 1 + below(below(4) ? 40 : 300), work.width = 1 + below(below(4) ? 40 : 300);
    work.kernel = static_cast<Kernel>(below(4)), work.output = static_cast<Output>(below(4));
    work.antialias = below(2), work.clip = below(2), work.chw = below(2);
    const bool is_padded = !below(3);
    for (int axis = 0; axis < 2 && is_padded; ++axis) {
      const int outputs = axis ? work.width : work.height;
      image.shown[axis] = 1 + static_cast<int>(below(outputs + 1)), image.before[axis] = static_cast<int>(below(outputs));
    }
    if (Check(work, image)) {
      ++refused;
      continue;
    }
    // Of its very size, so that a write beyond it is found.
    std::vector<uint8_t> out(static_cast<size_t>(3) * work.height * work.width * sizes[work.output]);
    Resampler(work, image, out.data()).Fill(static_cast<int>(image.height) - 1, 0, [&](int line) {
      return pixels.data() + 3 * image.width * line;
    });
    const float* values = reinterpret_cast<const float*>(out.data());
    for (size_t place = 0; work.output == kFloat32 && place < out.size() / 4; ++place) {
      if (!(values[place] > -200 && values[place] < 500)) return std::printf("found %g\n", values[place]), 1;
    }
    ++done;
    if (work.height > 100 || work.width > 100) continue;
    std::vector<uint8_t> image_of_size(static_cast<size_t>(3) * work.height * work.width);
    for (auto& pixel : image_of_size) pixel = static_cast<uint8_t>(random());
    std::vector<float> rows(static_cast<size_t>(kRowSize) * (1 + below(4)));
    for (size_t place = 0; place < rows.size(); ++place) {
      const double scales[] = {1, 1, 10, 300, 1 << 25};
      rows[place] = static_cast<float>((2 * part() - 1) * scales[below(5)]);
      if (!below(200)) rows[place] = static_cast<float>(odd[below(11)]);
      if (place % kRowSize == 0) rows[place] = static_cast<float>(below(kNumPrimitives + (below(50) ? 0 : 1)));
      if (place % kRowSize == 1 && rows[place - 1] == kBlur) rows[place] = static_cast<float>(0.01 + 8 * part());
      if (place % kRowSize == 5 && rows[place - 5] == kErase) rows[place] = std::abs(rows[place]);
    }
    if (CheckRows(rows.data(), static_cast<int64_t>(rows.size()))) {
      ++refused;
      continue;
    }
    Augment(work, image_of_size.data(), rows.data(), static_cast<int64_t>(rows.size()) / kRowSize, image.mirror, out.data());
    const int batch_size = 1 + static_cast<int>(below(4));
    std::vector<char> batch(out.size() * static_cast<size_t>(batch_size));
    Mixing mixing;
    mixing.weight = static_cast<float>(part());
    mixing.top = below(work.height + 1), mixing.left = below(work.width + 1);
    mixing.bottom = mixing.top + below(work.height + 1 - mixing.top), mixing.right = mixing.left + below(work.width + 1 - mixing.left);
    Mix(work, mixing, batch_size, 3, static_cast<size_t>(sizes[work.output]), batch.data());

    // Views from numbers of which some are none, in memory of their very size.
    std::vector<double> described(static_cast<size_t>(below(40)));
    for (double& number : described) number = below(4) ? static_cast<double>(1 + below(7)) : odd[below(11)];
    std::vector<View> views;
    ReadViews(described.data(), static_cast<int64_t>(described.size()), &views);

    // A part of an image of another size, each in memory of its very size.
    View view;
    static_cast<Work&>(view) = work;
    view.crop = below(2) ? kNoCrop : kLetterbox, view.num_uniforms = 3, view.fill = 9;
    const double numbers[] = {0.5, 9};
    view.numbers = numbers;
    const float uniforms[] = {static_cast<float>(part()), 0, 0};
    const int64_t stored[] = {1 + below(60), 1 + below(60), 1 + below(8)};
    Part there = {below(3), below(3), stored[0] - below(2), stored[1] - below(2), 1 << below(4)};
    if (there.ratio > 1 || below(4)) there = {0, 0, (stored[0] + there.ratio - 1) / there.ratio, (stored[1] + there.ratio - 1) / there.ratio, there.ratio};
    std::vector<uint8_t> decoded(static_cast<size_t>(3 * there.height * there.width), 7);
    char* const places[] = {reinterpret_cast<char*>(out.data())};
    shown += !Decoding().MakeOf(decoded.data(), there, stored, {view}, uniforms, nullptr, places);

    // Bytes that begin like an image, and go on with what its parts are made of.
    const std::string heads[] = {"\xFF\xD8\xFF\xE1", "\x89PNG\r\n\x1A\n", "RIFF....WEBPVP8X\n...\x08", "BM"};
    const std::string parts[] = {std::string("Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0", 28), "EXIF", "eXIf", "\xFF\xE1", std::string("\0\x22", 2), std::string("\0\0\0\x20", 4)};
    std::string text = heads[below(4)];
    for (int64_t count = below(12); count > 0; --count) text += below(8) ? parts[below(6)] : std::string(static_cast<size_t>(below(4)), static_cast<char>(random()));
    if (!below(5)) text.resize(static_cast<size_t>(below(static_cast<int64_t>(text.size()) + 1)));
    const std::vector<uint8_t> bytes(text.begin(), text.end());
    found[0] += IsAccepted({bytes.data(), bytes.data() + bytes.size()});
    found[1] += FindOrientation(bytes.data(), bytes.size()) == 6;
  }
  std::printf("%ld done, %ld refused, %ld shown, %ld accepted, %ld turned\n", done, refused, shown, found[0], found[1]);
}
